import copy
import time

import pytest
from tests.unit.fastcheckd.registry.small_cluster import (
    RANKS,
    cluster,
    commit,
    move,
    open_rank,
    record,
    refused,
    register,
    rehold,
    set_draining,
    set_state,
)

import fastcheckd.registry.state as state_module
from fastcheck_proto.conventions import RANK_MAX
from fastcheckd.registry import commands, wire
from fastcheckd.registry.commits import Standing, standing
from fastcheckd.registry.nodes import NODES_MAX
from fastcheckd.registry.records import is_lossy
from fastcheckd.registry.sessions import (
    JOBS_MAX,
    PAST_CLIENTS_MAX,
    SEATS_MAX,
    SEATS_OF_OWNER_MAX,
    count_seats,
)
from fastcheckd.registry.state import (
    SCHEMA,
    SCHEMA_OLDEST,
    SEEN_CLIENTS_MAX,
    SEEN_RESULTS_MAX,
    apply,
    new_state,
    restore,
    snapshot,
)
from fastcheckd.registry.view import job_views


def test_a_lossy_rank_stays_lossy_and_an_exact_one_is_as_before_there_was_such_a_thing():
    state = cluster()
    lossy, exact = RANKS[0] | {"lossy": True}, RANKS[1] | {"lossy": False}
    assert apply(state, commit(1, [lossy, exact]))["ok"]
    first, second = state["jobs"]["gpt"]["steps"][0]["ranks"]
    assert first["lossy"] is True and "lossy" not in second
    message = wire.step_message("gpt", state["jobs"]["gpt"]["steps"][0], None)
    assert [rank.lossy for rank in message.ranks] == [True, False]
    assert is_lossy([first, second]), "one lossy rank makes a lossy step"
    assert not is_lossy([second])
    assert [wire.rank_record(rank)["lossy"] for rank in message.ranks] == [True, False]
    assert apply(state, commit(1, [lossy, RANKS[1]]))["ok"]  # a repetition, as an older version would make it


def test_lossy_is_true_or_false():
    assert apply(cluster(), commit(1, [RANKS[0] | {"lossy": 1}, RANKS[1]]))["code"] == "INVALID"


def test_a_life_gets_one_incarnation_and_a_new_life_a_new_one():
    state = new_state()
    first = apply(state, register("a"))
    assert first == {"ok": True, "incarnation": 1, "epoch": 1}
    assert apply(state, register("a")) == first
    assert state["epoch"] == 1
    assert apply(state, register("a", "life-2")) == {"ok": True, "incarnation": 2, "epoch": 2}


def test_down_needs_the_right_incarnation_and_ends_the_life():
    state = cluster()
    assert refused(state, set_state(["n0", 9], "DOWN"))["code"] == "FENCED"
    assert apply(state, set_state(["n0", 1], "DOWN"))["epoch"] == 4
    assert apply(state, set_state(["n0", 1], "DOWN"))["epoch"] == 4, "the same again is no change"
    assert refused(state, set_state(["n0", 1], "UP"))["code"] == "FENCED"
    assert apply(state, register("n0"))["incarnation"] == 4, "the same life that was DOWN needs a new one"


def test_sessions_count_up_and_the_same_process_keeps_its_own():
    state = cluster()
    assert apply(state, open_rank(client="c0"))["session"] == 1
    assert apply(state, open_rank(client="c0-new"))["session"] == 3
    # The old process asks again, late: it must not get its place back.
    assert refused(state, open_rank(client="c0"))["code"] == "FENCED"
    assert refused(state, open_rank(client="x", node=("n0", 9)))["code"] == "INCARNATION_OVER"
    assert refused(state, open_rank(client="x", rank=2))["code"] == "INVALID"


def test_commit_and_its_repetition():
    state = cluster()
    assert apply(state, commit(5, RANKS)) == {"ok": True, "step": 5}
    version = state["version"]
    assert apply(state, commit(5, list(reversed(RANKS)))) == {"ok": True, "step": 5}
    assert state["version"] == version
    assert state["jobs"]["gpt"]["steps"][0]["copies"] == 1
    other = [record(0, 1, ("n0", 1), [("n2", 3)], digest="cd" * 16), RANKS[1]]
    assert refused(state, commit(5, other))["code"] == "NOT_NEWER"
    assert refused(state, commit(4, RANKS))["code"] == "NOT_NEWER"


def test_retention_keeps_the_newest_steps():
    state = cluster()
    for step in (1, 2, 3, 7):
        assert apply(state, commit(step, RANKS))["ok"]
    job = state["jobs"]["gpt"]
    assert [kept["step"] for kept in job["steps"]] == [3, 7] and job["newest"] == 7
    # A late question about a step that is gone still gets the right answer.
    assert standing(job, 2, 0, 1) is Standing.COMMITTED
    assert standing(job, 5, 0, 1) is Standing.SUPERSEDED
    session = apply(state, open_rank(client="later"))["session"]
    assert standing(job, 2, 0, session) is Standing.NOT_NEWER
    assert standing(job, 8, 0, session) is Standing.OPEN


def test_a_stale_session_fences_only_its_rank():
    state = cluster()
    apply(state, open_rank(rank=1, client="c1-new", node=("n1", 2)))
    result = refused(state, commit(5, RANKS))
    assert result["code"] == "FENCED" and result["ranks"] == [1]


def test_an_owner_whose_life_is_over_is_fenced():
    for end in (set_state(["n0", 1], "DOWN"), register("n0", "life-2")):
        state = cluster()
        apply(state, end)
        result = refused(state, commit(5, RANKS))
        assert result["code"] == "INCARNATION_OVER" and result["ranks"] == [0]


def test_a_lost_holder_is_named():
    for end in (set_state(["n2", 3], "DOWN"), register("n2", "life-2")):
        state = cluster()
        apply(state, end)
        result = refused(state, commit(5, RANKS))
        assert result["code"] == "HOLDER_LOST" and result["lost"] == [["n2", 3]] and result["ranks"] == [0, 1]


def test_a_draining_holder_is_as_good_as_any():
    state = cluster()
    apply(state, set_draining("n2"))
    assert apply(state, commit(5, RANKS))["ok"]


def test_a_report_repeated_after_its_copies_moved_is_the_same_report():
    state = cluster()
    assert apply(state, commit(5, RANKS))["ok"]
    apply(state, register("n3"))
    apply(state, register("n0", "life-2"))
    change = move(add=["n3", 4], remove=["n2", 3])
    assert apply(state, rehold(change, move(kind="owner", add=["n0", 5])))["done"] == [True, True]
    assert standing(state["jobs"]["gpt"], 5, 0, 1, RANKS[0]) is Standing.COMMITTED
    assert apply(state, commit(5, RANKS)) == {"ok": True, "step": 5}
    other = record(0, 1, ("n0", 1), [("n2", 3)], digest="cd" * 16)
    assert standing(state["jobs"]["gpt"], 5, 0, 1, other) is Standing.SUPERSEDED
    assert refused(state, commit(5, [other, RANKS[1]]))["code"] == "NOT_NEWER"


def test_malformed_commits_are_refused():
    good = RANKS
    bad_tiling = copy.deepcopy(good)
    bad_tiling[0]["shards"][1]["offset"] += 1
    short = copy.deepcopy(good)
    short[0]["shards"].pop()
    by_owner = [record(0, 1, ("n0", 1), [("n0", 1)]), good[1]]
    twice = [record(0, 1, ("n0", 1), [("n2", 3), ("n2", 3)]), good[1]]
    for ranks, more in (
        (good[:1], {}),
        ([good[0], good[0]], {}),
        (bad_tiling, {}),
        (short, {}),
        (by_owner, {}),
        (twice, {"tolerate": 2}),
        (good, {"tolerate": 2}),
        (good, {"epoch": 99}),
        (good, {"step": -1}),
        (good, {"step": True}),
        ([*good, record(2, 3, ("n0", 1), [("n2", 3)])], {}),
    ):
        assert refused(cluster(), commit(5, ranks) | more)["code"] == "INVALID", (ranks, more)
    state = cluster()
    apply(state, open_rank(rank=0, world_size=4, client="c0"))
    ranks = [record(0, 3, ("n0", 1), [("n2", 3)]), good[1]]
    assert refused(state, commit(5, ranks))["code"] == "WORLD_SIZE"


def test_an_empty_state_can_be_committed():
    state = cluster()
    ranks = [record(0, 1, ("n0", 1), [("n2", 3)], 0), record(1, 2, ("n1", 2), [("n2", 3)], 0)]
    assert apply(state, commit(1, ranks))["ok"]


def test_a_command_proposed_twice_is_applied_once():
    state = new_state()
    numbered = register("a") | {"client_id": "p", "seq": 1}
    first = apply(state, numbered)
    apply(state, register("a", "life-2"))
    assert apply(state, numbered) == first and state["nodes"]["a"]["incarnation"] == 2
    bad = {"type": "set_state", "client_id": "p", "seq": 2}
    assert apply(state, bad) == apply(state, bad)


def test_what_is_remembered_of_proposers_is_bounded():
    state = new_state()
    for seq in range(SEEN_RESULTS_MAX + 20):
        apply(state, register("a") | {"client_id": "p", "seq": seq})
    assert len(state["seen"]["p"]) == SEEN_RESULTS_MAX
    too_old = apply(state, register("a", "life-9") | {"client_id": "p", "seq": 3})
    assert too_old["code"] == "INVALID" and state["nodes"]["a"]["life_id"] == "life-1"
    for client in range(SEEN_CLIENTS_MAX + 5):
        apply(state, register("a") | {"client_id": f"q{client}", "seq": 1})
    assert len(state["seen"]) == SEEN_CLIENTS_MAX and "p" not in state["seen"]


def test_nodes_and_jobs_are_bounded_and_numbers_never_come_back():
    state = cluster()
    for i in range(NODES_MAX - 3):
        apply(state, register(f"m{i}"))
    assert refused(state, register("one-more"))["code"] == "INVALID"
    apply(state, set_state(["m5", state["nodes"]["m5"]["incarnation"]], "DOWN"))
    added = apply(state, register("one-more"))
    assert added["ok"] and "m5" not in state["nodes"] and added["incarnation"] > NODES_MAX
    for i in range(JOBS_MAX - 1):
        apply(state, open_rank(job=f"job-{i}"))
    apply(state, open_rank(job="job-7", client="again"))
    assert apply(state, open_rank(job="one-more"))["session"] == 3, (
        "job gpt, oldest without a step, made room"
    )
    assert "gpt" not in state["jobs"] and len(state["jobs"]) == JOBS_MAX


def test_of_too_many_jobs_one_without_a_trainer_is_forgotten_before_one_that_may_be_in_its_first_step():
    state = cluster()  # job gpt has opened its ranks, and committed nothing yet
    for i in range(JOBS_MAX - 1):
        opened = apply(state, open_rank(job=f"job-{i}", world_size=1))
        if i in (5, 6):
            assert apply(state, commands.close_rank(f"job-{i}", 0, opened["session"]))["ok"]
    for name in ("more-0", "more-1"):
        assert apply(state, open_rank(job=name))["session"]
    assert {"job-5", "job-6"}.isdisjoint(state["jobs"]) and len(state["jobs"]) == JOBS_MAX
    assert apply(state, commit(1, RANKS))["ok"], "its first step"
    # All that have no step have a trainer, as far as anybody knows: the oldest makes room.
    assert apply(state, open_rank(job="more-2"))["session"]
    assert "job-0" not in state["jobs"] and "gpt" in state["jobs"]


def opened(state, job, owner, rank=0):
    return apply(state, open_rank(job=job, rank=rank, world_size=RANK_MAX) | {"identity": owner})


def fill(state, job, owner, count):
    """A job without steps whose ranks are all there, as if each had been opened."""
    assert opened(state, job, owner)["ok"]
    seat = state["jobs"][job]["ranks"]["0"]
    state["jobs"][job]["ranks"] = {str(rank): seat | {"client": "c" * 64} for rank in range(count)}


def test_an_owner_has_so_many_ranks_and_makes_room_by_its_own_jobs():
    state, half = cluster(), SEATS_OF_OWNER_MAX // 2
    fill(state, "b1", "trainer/bob", half)
    fill(state, "b2", "trainer/bob", half)
    assert opened(state, "b3", "trainer/bob")["ok"]
    assert set(state["jobs"]) == {"gpt", "b2", "b3"}, "his oldest without steps, not another one's"
    fill(state, "b4", "trainer/bob", half - 1)
    for job in ("b2", "b3"):
        state["jobs"][job]["steps"] = [{"step": 1}]
    again = open_rank(job="b4", rank=half, world_size=RANK_MAX) | {"identity": "trainer/bob"}
    told = refused(state, again)
    assert (
        told["code"] == "INVALID" and "ranks of jobs of trainer/bob already: delete jobs" in told["message"]
    )
    assert opened(state, "b4", "trainer/bob", rank=3)["ok"], "a place that there is may be taken over"
    assert opened(state, "alices", "trainer/alice")["ok"]


def test_all_have_so_many_ranks_and_whoever_has_most_makes_room():
    state = cluster()
    fill(state, "b1", "trainer/bob", SEATS_OF_OWNER_MAX)
    fill(state, "c1", "trainer/carol", SEATS_MAX - SEATS_OF_OWNER_MAX - 3)
    assert opened(state, "alices", "trainer/alice")["ok"]
    assert count_seats(state) == SEATS_MAX
    assert opened(state, "alices", "trainer/alice", rank=1)["ok"]
    assert set(state["jobs"]) == {"gpt", "c1", "alices"}


def test_as_many_ranks_as_there_may_be_are_a_snapshot_that_is_quick():
    state = cluster()
    for name in ("b1", "b2"):
        fill(state, name, f"trainer/{name}", SEATS_OF_OWNER_MAX)
        for seat in state["jobs"][name]["ranks"].values():
            seat["past"] = ["c" * 64] * PAST_CLIENTS_MAX
    assert count_seats(state) >= SEATS_MAX
    times = []
    for _ in range(5):
        began = time.thread_time()
        data = snapshot(state)
        times.append(time.thread_time() - began)
    # A follower waits 0.5 s for the leader; other processes' work, which slows this one's core, does not count here.
    assert min(times) < 0.5, times
    assert len(data) < 40 << 20
    assert restore(data) == state


def test_who_opens_job_after_job_has_none_forgotten_but_its_own():
    state = cluster()
    assert opened(state, "alices", "trainer/alice")["ok"]
    for i in range(JOBS_MAX + 10):
        assert opened(state, f"b{i}", "trainer/bob")["ok"]
    assert len(state["jobs"]) == JOBS_MAX and {"alices", "gpt"} <= set(state["jobs"])


def test_restore_refuses_what_is_not_a_snapshot():
    missing = new_state()
    del missing["history"]
    for data in (
        b"",
        b"7",
        b"[]",
        b"{}",
        snapshot(new_state() | {"schema": "6"}),
        snapshot(missing),
    ):
        with pytest.raises(ValueError):
            restore(data)


@pytest.mark.parametrize("schema", [SCHEMA_OLDEST - 1, SCHEMA + 1])
def test_a_snapshot_of_a_schema_that_is_not_known_is_refused_with_both_versions(schema):
    says = f"has schema {schema}, this version reads {SCHEMA_OLDEST} to {SCHEMA}"
    with pytest.raises(ValueError, match=says):
        restore(snapshot(new_state() | {"schema": schema}))


def test_a_schema_that_is_agreed_on_never_goes_back(monkeypatch):
    state = new_state()
    assert refused(state, commands.upgrade(SCHEMA + 1))["code"] == "INVALID"
    monkeypatch.setattr(state_module, "SCHEMA", SCHEMA + 1)
    assert apply(state, commands.upgrade(SCHEMA + 1))["schema"] == SCHEMA + 1
    assert apply(state, commands.upgrade(SCHEMA))["schema"] == SCHEMA + 1
    assert restore(snapshot(state)) == state


def test_a_place_is_taken_only_from_the_session_that_is_to_be_replaced():
    state = cluster()
    late = open_rank(client="late") | {"replaces": 1}
    assert apply(state, open_rank(client="c0-new") | {"replaces": 1}) == {
        "ok": True,
        "session": 3,
        "current": 3,
    }
    before = copy.deepcopy(state)
    assert apply(state, late) == {"ok": True, "session": 0, "current": 3}, "it lived before the new one"
    assert state == before
    assert apply(state, open_rank(client="c0-new") | {"replaces": 1})["session"] == 3, (
        "the same one, repeated"
    )
    assert apply(state, late | {"replaces": 3})["session"] == 4
    assert apply(state, open_rank(job="other") | {"replaces": 7}) == {"ok": True, "session": 0, "current": 0}
    assert "other" not in state["jobs"]
    assert apply(state, open_rank(job="other") | {"replaces": 0})["session"] == 1
    for bad in (-1, "1", 1 << 63):
        assert refused(state, late | {"replaces": bad})["code"] == "INVALID"


def test_when_a_step_was_committed_is_kept():
    state = cluster()
    assert apply(state, commit(2, RANKS, at_ms=8))["ok"]
    (job,) = job_views(state)
    assert job.committed_at_ms == 8
    assert apply(state, commit(3, RANKS))["ok"], "of a leader that does not say"
    (job,) = job_views(state)
    assert job.committed_at_ms == 0
    assert refused(state, commit(4, RANKS, at_ms="noon"))["code"] == "INVALID"
