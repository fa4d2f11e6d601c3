"""Verdicts, told as incidents. One voter's detector; what the others say comes in as their answers to a round."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.health.detector import FailureDetector, Finding, Verdict

A, B = ("a", 1), ("b", 2)
ANSWERED, REFUSED, SILENT = Finding.ANSWERED, Finding.REFUSED, Finding.SILENT
SUSPECT_S, DOWN_S, HUSH_S, EVIDENCE_S = 0.4, 0.8, 0.2, 1.0


class Incident:
    """The leader among `voters`, ticking each 0.1 s, while nodes beat or do not."""

    def __init__(self, voters: int = 3, lead: bool = True) -> None:
        self.detector = FailureDetector(
            suspect_after_s=SUSPECT_S, down_after_s=DOWN_S, hush_s=HUSH_S, evidence_s=EVIDENCE_S
        )
        self.voters = voters
        self.now = 100.0
        self.lives = [A, B]
        self.detector.members(self.lives, self.now)
        if lead:
            self.detector.became_leader(self.now)

    def beats(self, seconds: float, *beating: tuple[str, int]) -> Incident:
        """Time passes; these nodes are heard each tick."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for life in beating:
                self.detector.heard(life, self.now)
            self.detector.judge(self.lives, self.voters, self.now)
        return self

    def round(self, life=A, *, silences=(), findings=(), unasked=0) -> Incident:
        """A whole round: other voters' silences, and what the askers found; the first one is the leader itself."""
        askers = [f"asker-{i}" for i in range(len(findings) + unasked)]
        number = self.detector.ask(life, askers, self.now)
        for i, silence_s in enumerate(silences):
            self.detector.reported(life, number, f"voter-{i}", silence_s)
        for asker, finding in zip(askers, [*findings, *[None] * unasked], strict=True):
            self.detector.found(life, number, asker, finding)
        return self

    def says(self, life=A) -> Verdict:
        return self.detector.judge(self.lives, self.voters, self.now)[life].verdict

    def why(self, life=A) -> str:
        return self.detector.judge(self.lives, self.voters, self.now)[life].reason


def settled(voters: int = 3) -> Incident:
    """A leader that has been in office for a while and hears everybody."""
    return Incident(voters).beats(1.0, A, B)


def test_silence_alone_makes_suspect_however_long_it_lasts():
    incident = settled().beats(0.4, B)
    assert incident.says() is Verdict.UP and incident.detector.in_question() == []
    incident.beats(0.1, B)
    assert incident.says() is Verdict.SUSPECT and incident.detector.in_question() == [A]
    assert incident.beats(60, B).says() is Verdict.SUSPECT
    assert incident.why().startswith("SILENT") and incident.says(B) is Verdict.UP


def test_a_killed_node_whose_stream_breaks_is_down_after_two_missed_beats():
    incident = settled()
    incident.detector.broke(A, incident.now)
    assert incident.says() is Verdict.SUSPECT and "broke" in incident.why()
    incident.round(silences=[0.05, 0.05], findings=[REFUSED] * 3)
    assert incident.says() is Verdict.SUSPECT, "a beat may still be on its way"
    incident.beats(0.3, B).round(silences=[0.25, 0.25], findings=[REFUSED] * 3)
    assert incident.says() is Verdict.DOWN
    assert incident.why().startswith("ended: 3 of 3 were refused") and "3 of 3 voters" in incident.why()


def test_a_machine_without_power_is_down_when_a_majority_has_been_silent_for_long_enough():
    incident = settled().beats(0.7, B).round(silences=[0.7], findings=[SILENT] * 3)
    assert incident.says() is Verdict.SUSPECT
    incident.beats(0.2, B)
    assert incident.says() is Verdict.SUSPECT, "the other voter's silence is of its moment, it does not grow"
    incident.round(silences=[0.85], findings=[SILENT] * 3)
    assert incident.says() is Verdict.DOWN and incident.why().startswith("unreachable: 3 of 3 got no answer")


def test_one_cut_link_to_the_leader_evicts_nobody():
    """The leader hears nothing and reaches nothing; everyone else does."""
    incident = settled().beats(5, B)
    incident.round(silences=[0.05, 0.08], findings=[SILENT, ANSWERED, ANSWERED, ANSWERED])
    assert incident.says() is Verdict.SUSPECT
    incident.round(silences=[0.05, 0.08], findings=[REFUSED] * 4)
    assert incident.says() is Verdict.SUSPECT, "two of three voters hear it"


def test_heartbeats_that_stop_while_the_address_answers_never_make_a_node_down():
    incident = settled().beats(5, B).round(silences=[5, 5], findings=[ANSWERED] * 5)
    assert incident.says() is Verdict.SUSPECT
    incident.round(silences=[5, 5], findings=[SILENT, SILENT, ANSWERED, ANSWERED])
    assert incident.says() is Verdict.SUSPECT, "two of four are fewer than two of three"


def test_two_of_three_askers_without_an_answer_are_enough_and_one_is_not():
    incident = settled().beats(2, B)
    assert incident.round(silences=[2], findings=[SILENT, REFUSED, ANSWERED]).says() is Verdict.DOWN
    assert incident.round(silences=[2], findings=[SILENT, ANSWERED, ANSWERED]).says() is Verdict.SUSPECT


def test_of_two_askers_both_must_be_without_an_answer():
    incident = settled().beats(2, B)
    assert incident.round(silences=[2], findings=[SILENT, ANSWERED]).says() is Verdict.SUSPECT
    assert incident.round(silences=[2], findings=[SILENT, SILENT]).says() is Verdict.DOWN


def test_an_asker_that_has_not_answered_yet_counts_as_asked():
    """The leader's own network refuses it; nobody else has been heard yet."""
    incident = settled().beats(1, B)
    number = incident.detector.ask(A, ["me", "x", "y"], incident.now)
    incident.detector.reported(A, number, "voter-1", 1.0)
    incident.detector.found(A, number, "me", REFUSED)
    assert incident.says() is Verdict.SUSPECT
    incident.detector.found(A, number, "x", REFUSED)
    assert incident.says() is Verdict.DOWN


def test_who_could_not_ask_does_not_count():
    incident = settled().beats(2, B)
    assert incident.round(silences=[2], findings=[REFUSED], unasked=3).says() is Verdict.DOWN
    assert incident.round(silences=[2], findings=[], unasked=4).says() is Verdict.SUSPECT


def test_a_finding_of_somebody_who_was_not_asked_is_ignored():
    incident = settled().beats(2, B)
    number = incident.detector.ask(A, ["me", "x", "y"], incident.now)
    incident.detector.reported(A, number, "voter-1", 2.0)
    for stranger in ("p", "q", "r"):
        incident.detector.found(A, number, stranger, REFUSED)
    assert incident.says() is Verdict.SUSPECT


def test_a_voter_alone_with_nobody_to_ask_goes_by_its_own_probe():
    incident = settled(voters=1).beats(0.5, B).round(findings=[SILENT])
    assert incident.says() is Verdict.SUSPECT
    incident.beats(0.4, B).round(findings=[SILENT])
    assert incident.says() is Verdict.DOWN
    other = settled(voters=1)
    other.detector.broke(A, other.now)
    assert other.beats(0.3, B).round(findings=[REFUSED]).says() is Verdict.DOWN


def test_of_three_voters_the_leader_alone_is_no_majority():
    incident = settled().beats(10, B).round(silences=[], findings=[REFUSED, REFUSED])
    assert incident.says() is Verdict.SUSPECT


def test_a_heartbeat_makes_everything_that_was_found_void():
    incident = settled().beats(2, B)
    number = incident.detector.ask(A, ["me"], incident.now)
    incident.detector.reported(A, number, "voter-1", 2.0)
    incident.detector.heard(A, incident.now)
    incident.detector.found(A, number, "me", REFUSED)
    incident.detector.broke(A, incident.now)
    assert incident.beats(0.5, B).says() is Verdict.SUSPECT


def test_old_evidence_does_not_count():
    incident = settled().beats(0.6, B).round(silences=[0.6, 0.6], findings=[SILENT] * 3)
    incident.round(silences=[0.9, 0.9], findings=[SILENT] * 3)
    assert incident.beats(0.9, B).says() is Verdict.DOWN
    assert incident.beats(0.2, B).says() is Verdict.SUSPECT


def test_late_answers_of_an_earlier_round_are_not_mixed_into_the_next():
    incident = settled().beats(2, B)
    first = incident.detector.ask(A, ["me", "x", "y"], incident.now)
    second = incident.detector.ask(A, ["me", "x", "y"], incident.now)
    incident.detector.reported(A, first, "voter-1", 2.0)
    for asker in ("me", "x", "y"):
        incident.detector.found(A, second, asker, REFUSED)
    assert incident.says() is Verdict.SUSPECT, "the silence belongs to the first round"


def test_a_new_leader_waits_one_window_and_then_uses_what_it_heard_itself():
    incident = Incident(lead=False).beats(1.0, A, B)
    incident.beats(0.7, B)
    incident.detector.became_leader(incident.now)
    incident.beats(0.3, B).round(silences=[1, 1], findings=[SILENT] * 3)
    assert incident.says() is Verdict.UP and incident.detector.in_question() == [A], "it may ask meanwhile"
    assert incident.beats(0.2, B).says() is Verdict.DOWN


def test_a_new_leader_needs_no_window_where_connections_are_refused():
    incident = Incident(lead=False).beats(1.0, A, B)
    incident.detector.broke(A, incident.now)  # the leader before was there
    incident.beats(0.7, B)
    incident.detector.became_leader(incident.now)
    assert incident.says() is Verdict.SUSPECT and incident.says(B) is Verdict.UP
    incident.round(silences=[0.7], findings=[REFUSED] * 2)
    assert incident.says() is Verdict.DOWN and incident.why().startswith("ended")


def test_a_judge_that_slept_holds_its_own_silence_against_nobody():
    incident = settled().beats(0.3, B)
    incident.now += 5.0
    incident.round(silences=[5], findings=[SILENT] * 3)
    assert incident.says() is Verdict.UP and incident.says(B) is Verdict.UP
    incident.beats(0.3, B)
    assert incident.says() is Verdict.UP
    assert incident.beats(0.2, B).says() is Verdict.SUSPECT
    assert incident.says(B) is Verdict.UP


def test_time_in_which_a_starved_judge_did_not_run_is_hardly_counted():
    """Gaps of 0.35 s: too short to start anew, and yet nobody can be heard in them."""
    incident = settled()
    for _ in range(2):
        incident.now += 0.35
        assert incident.says() is Verdict.UP
    said = incident.detector.testify(A, incident.now, silence_s=9, withhold_s=1)
    assert said is not None and abs(said - SUSPECT_S) < 1e-9, "of 0.7 s"


def test_a_hung_data_process_is_suspect_and_never_down_nor_in_question():
    incident = settled()
    for _ in range(600):
        incident.now += 0.1
        incident.detector.heard(A, incident.now, rpb.DATA_HEALTH_HUNG)
        incident.detector.heard(B, incident.now)
        assert incident.says() is Verdict.SUSPECT
    incident.round(silences=[0.0, 0.0], findings=[REFUSED] * 3)
    assert incident.why().startswith("DATA_HUNG") and incident.detector.in_question() == []
    incident.detector.heard(A, incident.now)
    assert incident.says() is Verdict.UP and incident.why() == ""


def test_every_trouble_of_a_data_process_has_its_reason():
    incident = settled()
    for health, reason in (
        (rpb.DATA_HEALTH_STARTING, "DATA_STARTING"),
        (rpb.DATA_HEALTH_GONE, "DATA_GONE"),
        (rpb.DATA_HEALTH_HUNG, "DATA_HUNG"),
        (rpb.DATA_HEALTH_UNSPECIFIED, "its data process is not well"),
    ):
        incident.detector.heard(A, incident.now, health)
        assert incident.why().startswith(reason) and incident.says() is Verdict.SUSPECT
        assert incident.detector.data(A) == health


def test_a_node_that_reconnects_is_up_with_its_next_heartbeat():
    incident = settled()
    incident.detector.broke(A, incident.now)
    assert incident.says() is Verdict.SUSPECT
    incident.detector.heard(A, incident.now)
    assert incident.says() is Verdict.UP and incident.detector.in_question() == []


def test_another_life_of_a_node_starts_afresh():
    incident = settled().beats(2, B).round(silences=[2, 2], findings=[REFUSED] * 3)
    assert incident.says() is Verdict.DOWN
    reborn = ("a", 7)
    incident.lives = [reborn, B]
    incident.detector.members(incident.lives, incident.now)
    assert incident.says(reborn) is Verdict.UP
    assert incident.detector.heard_ms_ago(reborn, incident.now) is None
    assert incident.detector.heard_ms_ago(A, incident.now) is None, "forgotten"


# What a voter says, and what it then owes


def test_a_voter_tells_its_silence_and_renews_no_lease_until_the_decision_is_due():
    voter = Incident(lead=False).beats(1.0, A, B).beats(0.9, B)
    said = voter.detector.testify(A, voter.now, silence_s=DOWN_S, withhold_s=2.0)
    assert said is not None and 0.89 < said < 0.91
    voter.detector.heard(A, voter.now)
    assert not voter.detector.renews(A, voter.now + 1.9), "also when it is heard again"
    assert voter.detector.renews(A, voter.now + 2.1)
    assert voter.detector.renews(B, voter.now)


def test_a_short_silence_is_told_and_costs_no_lease():
    voter = Incident(lead=False).beats(1.0, A, B).beats(0.5, B)
    said = voter.detector.testify(A, voter.now, silence_s=DOWN_S, withhold_s=2.0)
    assert said is not None and 0.49 < said < 0.51 and voter.detector.renews(A, voter.now)


def test_a_voter_that_just_started_or_just_woke_cannot_tell():
    voter = Incident(lead=False).beats(0.3, B)
    assert voter.detector.testify(A, voter.now, silence_s=0.1, withhold_s=2.0) is None
    assert voter.detector.renews(A, voter.now), "what it did not say binds it to nothing"
    voter.beats(2, B)
    assert voter.detector.testify(A, voter.now, silence_s=0.1, withhold_s=2.0) is not None
    voter.now += 5
    assert voter.detector.testify(A, voter.now, silence_s=0.1, withhold_s=2.0) is None
    said = voter.beats(0.5, B).detector.testify(A, voter.now, silence_s=9, withhold_s=2.0)
    assert said is not None and said < 0.6, "it answers for the time since then alone"


def test_a_voter_that_does_not_know_the_life_cannot_tell():
    voter = Incident(lead=False).beats(1, B)
    assert voter.detector.testify(("nobody", 3), voter.now, silence_s=0.1, withhold_s=2.0) is None


def test_a_judging_leader_withholds_too():
    incident = settled()
    incident.detector.withhold(A, incident.now + 2.0)
    assert not incident.detector.renews(A, incident.now + 1.0)
    assert incident.detector.renews(A, incident.now + 2.0)


# Damping


def test_a_node_that_comes_back_for_the_third_time_is_up_and_damped():
    incident = settled()
    incarnation = 1
    for returns in (1, 2, 3):
        incarnation += 10
        life = ("a", incarnation)
        incident.lives = [life, B]
        incident.detector.members(incident.lives, incident.now)
        assert (incident.detector.damped_s(life, incident.now) > 0) == (returns == 3)
    assert incident.says(life) is Verdict.UP and incident.why(life).startswith("DAMPED: it came back 3 times")
    assert incident.beats(10.1, life, B).why(life) == ""


# Whatever happens


events = st.lists(
    st.tuples(
        st.floats(0.001, 0.09),
        st.sampled_from(["beat", "broke", "refused", "silent", "mute voters", "tick", "leader"]),
    ),
    max_size=80,
)


@given(events, st.sampled_from([1, 3, 5]))
def test_whoever_is_heard_at_each_beat_is_never_down(happenings, voters):
    """All liars at once: every probe is refused, every other voter claims silence, the streams break."""
    incident = Incident(voters)
    heard = incident.now
    for gap, kind in happenings:
        incident.now += gap
        if incident.now - heard > 0.1 or kind == "beat":
            incident.detector.heard(A, incident.now)
            heard = incident.now
        if kind == "broke":
            incident.detector.broke(A, incident.now)
        elif kind == "leader":
            incident.detector.became_leader(incident.now)
        elif kind in {"refused", "silent"}:
            # The leader itself hears it, so a minority of liars can be as loud as it likes.
            liars = (voters // 2 + 1) - 1
            finding = REFUSED if kind == "refused" else SILENT
            incident.round(silences=[9.0] * liars, findings=[finding] * 4)
        assert incident.says() is not Verdict.DOWN


@given(
    st.integers(1, 7).filter(lambda n: n % 2),
    st.lists(st.one_of(st.none(), st.floats(0, 5)), max_size=6),
    st.lists(st.sampled_from([ANSWERED, REFUSED, SILENT, None]), min_size=1, max_size=9),
    st.floats(0, 5),
)
def test_down_needs_both_a_silent_majority_and_askers_without_an_answer(voters, silences, findings, own_s):
    incident = settled(voters).beats(own_s, B)
    silences = [s for s in silences[: voters - 1] if s is not None]
    incident.round(silences=silences, findings=[f for f in findings if f], unasked=findings.count(None))
    found = [f for f in findings if f]
    all_s = [*silences, incident.detector._silence_s(incident.detector._signs[A])]
    majority = voters // 2 + 1
    if incident.says() is Verdict.DOWN:
        assert sum(s >= HUSH_S for s in all_s) >= majority
        assert sum(f is not ANSWERED for f in found) * 2 > len(found)
        if found.count(REFUSED) * 2 <= len(found):
            assert sum(s >= DOWN_S for s in all_s) >= majority
            assert sum(f is not ANSWERED for f in found) * 3 >= len(found) * 2
    elif all(f is not ANSWERED for f in found) and found and all_s[-1] > SUSPECT_S:
        assert sum(s >= DOWN_S for s in all_s) < majority, "nothing is left to wait for"


@given(st.lists(st.floats(0.0, 30.0), max_size=30))
def test_silence_never_exceeds_the_time_that_passed_nor_what_was_listened_to(gaps):
    voter = Incident(lead=False)
    started = voter.now
    voter.detector.heard(A, voter.now)
    for gap in gaps:
        voter.now += gap
        said = voter.detector.testify(A, voter.now, silence_s=1e9, withhold_s=0)
        assert said is None or 0 <= said <= voter.now - started + 1e-6
        if gap > SUSPECT_S:
            assert said is None, "it slept"
