import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import common_pb2
from fastcheck_proto.v1.registry_pb2 import RankRecord
from fastcheckd.registry.collector import (
    ABSENT_SHOWN_MAX,
    SHOWN_S,
    STALE_AFTER_S,
    STEPS_MAX,
    Collector,
    WorldSizeConflictError,
)
from fastcheckd.registry.model import Ref, refusal


def record(rank, session=1, mark=10):
    return RankRecord(rank=rank, session=session, state_bytes=mark)


LOST = refusal(common_pb2.ERROR_CODE_HOLDER_LOST, "lost")


def report(collector, step, rank, now=0.0, session=1, *, world_size=2, mark=10):
    return collector.report("gpt", step, world_size, record(rank, session, mark), now)


def ready(collector, now=0.0):
    step = collector.next_commit("gpt", now)
    return None if step is None else step.step


def test_a_step_is_ready_when_its_last_rank_is_in():
    c = Collector()
    report(c, 1, 0)
    assert ready(c) is None
    report(c, 1, 1)
    assert ready(c) == 1
    assert c.committed("gpt", 1) == [] and ready(c) is None and c.jobs() == []


def test_the_newest_report_of_a_rank_wins_but_not_one_of_an_older_session():
    c = Collector()
    report(c, 1, 0, session=2, mark=2)
    report(c, 1, 0, session=1, mark=1)
    report(c, 1, 1)
    assert c.next_commit("gpt", 0).reports[0].state_bytes == 2
    report(c, 1, 0, session=2, mark=3)
    assert c.next_commit("gpt", 0).reports[0].state_bytes == 3


def test_a_newer_step_waits_for_an_older_one_that_makes_progress():
    c = Collector()
    report(c, 1, 0, now=0)
    for rank in (0, 1):
        report(c, 2, rank, now=1)
    assert ready(c, now=2) is None
    report(c, 1, 0, now=4)  # the same again is no progress
    assert ready(c, now=STALE_AFTER_S - 0.1) is None
    assert ready(c, now=STALE_AFTER_S) == 2
    report(c, 1, 1, now=4.5)
    assert ready(c, now=4.5) == 1, "older first"
    assert c.committed("gpt", 2) == [1]


def test_a_placed_step_without_reports_holds_nobody_up():
    c = Collector()
    c.placed("gpt", 1, world_size=2, rank=0, node=Ref("n", 1), state_bytes=7, oldest_step=1, now=0)
    for rank in (0, 1):
        report(c, 2, rank)
    assert ready(c) == 2
    assert [(s.step, len(s.reports)) for s in c.under_way("gpt", 1)] == [(1, 0), (2, 2)]
    c.expire(SHOWN_S)
    assert c.jobs() == []


def test_a_new_session_voids_the_reports_of_the_one_before():
    c = Collector()
    report(c, 1, 0, session=1)
    report(c, 1, 1, session=2)
    report(c, 2, 0, session=3)
    assert c.opened("gpt", 1, 4) == [1]
    assert ready(c) is None
    report(c, 2, 1, session=4)
    assert ready(c) == 2, "step 1 lost a rank: nobody waits for it"


def test_refused_ranks_have_to_report_again():
    c = Collector()
    for rank in (0, 1):
        report(c, 1, rank)
    c.drop("gpt", 1, [1])
    assert ready(c) is None
    report(c, 1, 1)
    assert ready(c) == 1
    gone = c.recheck("gpt", lambda step, world_size, r: LOST if r.rank == 0 else None)
    assert gone == [(1, 0, LOST)] and ready(c) is None
    assert c.recheck("other", lambda *_: LOST) == []


def test_world_sizes_do_not_mix():
    c = Collector()
    report(c, 1, 0, session=5)
    with pytest.raises(WorldSizeConflictError):
        report(c, 1, 1, session=4, world_size=3)
    report(c, 1, 0, session=6, world_size=1)
    assert ready(c) == 1


def test_steps_under_way_are_bounded():
    c = Collector()
    for step in range(STEPS_MAX):
        assert report(c, step, 0) == []
    assert report(c, STEPS_MAX, 0) == [0]


@given(
    st.lists(
        st.tuples(st.sampled_from(["report", "open", "tick"]), st.integers(1, 4), st.integers(0, 2)),
        max_size=40,
    )
)
def test_commits_come_in_order_and_only_from_current_sessions(events):
    c, now, committed = Collector(), 0.0, []
    session = dict.fromkeys(range(3), 1)
    for kind, step, rank in events:
        now += 0.5
        if kind == "report" and step > max(committed, default=0):
            report(c, step, rank, now, session[rank], world_size=3)
        elif kind == "open":
            session[rank] = max(session.values()) + 1
            c.opened("gpt", rank, session[rank])
        while (plan := c.next_commit("gpt", now)) is not None:
            assert {r: rec.session for r, rec in plan.reports.items()} == session
            assert all(old < plan.step for old in committed)
            assert all(old < plan.step for old in c.committed("gpt", plan.step))
            committed.append(plan.step)


def place(c, step, rank, oldest_step, node=("n", 1)):
    c.placed(
        "gpt", step, world_size=3, rank=rank, node=Ref(*node), state_bytes=1, oldest_step=oldest_step, now=0
    )


def test_absent_is_who_neither_reported_nor_is_at_work():
    c = Collector()
    assert c.absent("gpt", 1, is_live=bool) == []
    place(c, 1, rank=0, oldest_step=1)
    assert c.absent("gpt", 1, is_live=bool) == [1, 2]
    place(c, 1, rank=1, oldest_step=1, node=("m", 4))
    assert c.absent("gpt", 1, is_live=bool) == [2]
    assert c.absent("gpt", 1, is_live=lambda node: node != ("m", 4)) == [1, 2]


def test_a_rank_whose_data_process_ended_is_absent_until_the_next_one_goes_on():
    c = Collector()
    for rank, node in enumerate((("n", 1), ("m", 4), ("m", 4))):
        place(c, 1, rank, oldest_step=1, node=node)
    c.stopped(Ref("m", 4))
    assert c.absent("gpt", 1, is_live=bool) == [1, 2]
    place(c, 1, rank=1, oldest_step=1, node=("m", 4))
    assert c.absent("gpt", 1, is_live=bool) == [2]


def test_a_rank_at_work_on_newer_steps_only_is_absent_from_the_older():
    c = Collector()
    for rank in range(3):
        place(c, 1, rank, oldest_step=1)
    place(c, 2, rank=0, oldest_step=1)
    assert c.absent("gpt", 1, is_live=bool) == []
    place(c, 3, rank=0, oldest_step=2)
    assert c.absent("gpt", 1, is_live=bool) == [0]
    assert c.absent("gpt", 2, is_live=bool) == [1, 2]


def test_late_are_ranks_that_no_step_under_way_has_or_those_that_the_newest_waits_for():
    c = Collector()
    assert c.late("gpt", 0) == []
    place(c, 1, rank=2, oldest_step=1)
    assert c.late("gpt", 0) == [], "nobody waits for anybody"
    for step in (1, 2, 3):
        report(c, step, 0, world_size=3)
    report(c, 2, 2, world_size=3)
    assert c.late("gpt", 0) == [1]
    report(c, 1, 1, world_size=3)
    assert c.late("gpt", 0) == [1, 2], "each has reported something, so the newest step says it"
    assert c.late("gpt", SHOWN_S) == []


def test_few_late_ranks_are_named():
    c = Collector()
    report(c, 1, 0, world_size=1000)
    assert c.late("gpt", 0) == list(range(1, 1 + ABSENT_SHOWN_MAX))
