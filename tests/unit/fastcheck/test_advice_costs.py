"""What saves cost, as `Checkpointer.advise` reckons with it."""

import pytest

import fastcheck
from fastcheck import SaveHandle
from fastcheck.advice import REMEMBERED_MAX, Measured
from fastcheck_proto.v1 import trainer_pb2 as pb


def save(step, at, *, stall=0.5, waited=0.0, committed_after=2.0, replicate=1.5):
    """A save that was called at a moment, by the monotonic clock."""
    handle = SaveHandle(step)
    handle._stage(waited, 0.1)
    handle._block(stall + waited)
    handle._began_at, handle._returned_at = at, at + stall + waited
    if committed_after is not None:
        handle._absorb(pb.SaveProgress(state=pb.SAVE_STATE_COMMITTED, replicate_s=replicate))
        handle._ended_at = handle._returned_at + committed_after
    return handle


def test_costs_are_medians_and_waiting_for_older_steps_is_none_of_them():
    measured = Measured()
    at = 0.0
    for step in range(10, 60, 10):
        waited = 7.0 if step == 30 else 0.0
        measured.note(save(step, at, waited=waited))
        at += 0.5 + waited + 10 * 3.0  # ten steps of three seconds
    costs = measured.costs()
    assert costs.step_s == pytest.approx(3.0)
    assert costs.stall_s == pytest.approx(0.5)
    assert (costs.commit_s, costs.busy_s) == (pytest.approx(2.0), pytest.approx(1.5))


def test_nothing_is_known_before_a_save_is_committed_and_a_step_was_seen():
    measured = Measured()
    assert measured.costs() is None
    measured.note(save(1, 0.0, committed_after=None))
    measured.note(save(2, 1.0, committed_after=None))
    assert measured.costs(step_s=1.0) is None
    one = Measured()
    one.note(save(1, 0.0))
    assert one.costs() is None and one.costs(step_s=4.0).step_s == 4.0


def test_only_the_last_saves_count():
    measured = Measured()
    for step in range(REMEMBERED_MAX):
        measured.note(save(step, step * 100.0, stall=50.0))
    for step in range(REMEMBERED_MAX):
        measured.note(save(REMEMBERED_MAX + step, 1e6 + step * 2.0, stall=1.0))
    assert measured.costs().stall_s == pytest.approx(1.0)


def test_a_checkpointer_that_has_saved_nothing_or_is_turned_off_advises_nothing(monkeypatch):
    with fastcheck.Checkpointer(job="gpt") as ckpt:
        assert ckpt.advise(mtbf_s=3600.0) is None
    monkeypatch.setenv("FASTCHECK_DISABLE", "1")
    with fastcheck.Checkpointer(job="gpt") as ckpt:
        ckpt.save(1, {"a": 1})
        assert ckpt.advise(mtbf_s=3600.0) is None
    with pytest.raises(fastcheck.ClosedError):
        ckpt.advise()
