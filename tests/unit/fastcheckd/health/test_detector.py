from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.health.detector import FailureDetector, Verdict

A, B = ("a", 1), ("b", 2)


def detector():
    d = FailureDetector(suspect_after_s=0.8, down_after_s=3.0)
    d.became_leader(0.0)
    return d


def judge(d, until, *lives, since=0.0, step=0.2):
    """Judge at every step up to and including `until`; returns the last verdicts."""
    now, verdicts = since, {}
    while now < until:
        now = min(now + step, until)
        verdicts = d.judge(lives, now)
    return verdicts


def test_silence_makes_suspect_then_down():
    d = detector()
    d.heard(A, 0.0)
    assert judge(d, 0.8, A)[A] is Verdict.UP
    assert judge(d, 0.9, A, since=0.8)[A] is Verdict.SUSPECT
    assert judge(d, 3.0, A, since=0.9)[A] is Verdict.SUSPECT
    assert judge(d, 3.1, A, since=3.0)[A] is Verdict.DOWN


def test_a_refused_probe_is_down_at_once_but_never_outweighs_a_later_heartbeat():
    d = detector()
    d.heard(A, 0.0)
    d.heard(B, 0.0)
    judge(d, 0.9, A, B)
    d.probe_refused(A, sent_at=0.85)
    d.heard(B, 0.9)
    d.probe_refused(B, sent_at=0.85)
    verdicts = judge(d, 1.0, A, B, since=0.9)
    assert verdicts == {A: Verdict.DOWN, B: Verdict.UP}
    d.heard(A, 1.0)
    assert judge(d, 1.1, A, since=1.0)[A] is Verdict.UP


def test_an_answering_probe_is_a_sign_of_life():
    d = detector()
    now = 0.0
    for _ in range(10):
        now += 0.7
        d.probe_answered(A, now)
        assert judge(d, now, A, since=now - 0.7)[A] is Verdict.UP


def test_a_new_leader_waits_one_window():
    d = FailureDetector(suspect_after_s=0.8, down_after_s=3.0)
    d.heard(A, 0.0)
    d.became_leader(100.0)
    d.probe_refused(A, sent_at=100.0)
    assert judge(d, 100.8, A, since=100.0)[A] is Verdict.UP
    assert judge(d, 100.9, A, since=100.8)[A] is Verdict.DOWN


def test_a_judge_that_slept_draws_no_conclusions_from_it():
    d = detector()
    d.heard(A, 0.0)
    judge(d, 0.6, A)
    assert d.judge([A], 60.0)[A] is Verdict.UP
    assert judge(d, 60.8, A, since=60.0)[A] is Verdict.UP
    assert judge(d, 61.0, A, since=60.8)[A] is Verdict.SUSPECT


def test_a_hung_data_process_is_suspect_and_never_down():
    d = detector()
    now = 0.0
    for _ in range(50):
        now += 0.2
        d.heard(A, now, data_ready=False)
        assert d.judge([A], now)[A] is Verdict.SUSPECT
        assert d.silence_s(A, now) == 0.0, "no probe is due"
    d.heard(A, now, data_ready=True)
    assert d.judge([A], now)[A] is Verdict.UP


def test_another_life_of_a_node_starts_afresh():
    d = detector()
    judge(d, 0.9, A)
    d.probe_refused(A, sent_at=0.9)
    assert judge(d, 1.0, ("a", 7), since=0.9)[("a", 7)] is Verdict.UP


@given(
    st.lists(
        st.tuples(st.floats(0.01, 0.7), st.sampled_from(["heard", "answered", "refused", "judge"])),
        max_size=60,
    )
)
def test_whoever_is_heard_often_enough_is_never_down(events):
    d, now, heard = detector(), 0.0, 0.0
    for gap, kind in events:
        now += gap
        if now - heard > 0.7:
            d.heard(A, now)
            heard = now
        if kind == "heard":
            d.heard(A, now)
            heard = now
        elif kind == "answered":
            d.probe_answered(A, now)
            heard = now
        elif kind == "refused":
            d.probe_refused(A, sent_at=now)
        assert d.judge([A], now)[A] is Verdict.UP
