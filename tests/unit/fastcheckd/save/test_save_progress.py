"""How far a job has come, from what its saves say."""

from types import SimpleNamespace

from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.save.job_progress import job_progress
from fastcheckd.save.save import FINAL, SaveKey


def save(step, state, sealed_at=0.0, job="gpt", rank=0):
    return SimpleNamespace(
        key=SaveKey(job, rank, step), state=state, sealed_at=sealed_at, done=state in FINAL,
    )  # fmt: skip


def progress(saves, newest=-1, committed_at=None, intervals=None):
    by_rank = {}
    for one in saves:
        by_rank.setdefault((one.key.job, one.key.rank), []).append(one)
    return job_progress(
        by_rank,
        newest=lambda _: newest,
        committed_at=committed_at or {},
        interval_s=(intervals or {}).get,
        now=100.0,
    )


def test_the_newest_step_in_each_state():
    (found,) = progress(
        [
            save(5, tpb.SAVE_STATE_COMMITTED, 80.0),
            save(6, tpb.SAVE_STATE_REPLICATED, 90.0),
            save(7, tpb.SAVE_STATE_STAGED, 95.0),
        ],
        newest=5,
        committed_at={"gpt": 91.0},
        intervals={("gpt", 0): 5.0},
    )
    assert (found.staged_step, found.replicated_step, found.committed_step) == (7, 6, 5)
    assert (found.in_flight, found.staged_age_s, found.committed_age_s, found.interval_s) == (
        2,
        5.0,
        9.0,
        5.0,
    )


def test_what_failed_was_not_replicated():
    (found,) = progress([save(5, tpb.SAVE_STATE_FAILED, 90.0)])
    assert (found.staged_step, found.replicated_step, found.committed_step) == (5, None, None)
    assert found.in_flight == 0 and found.committed_age_s is None


def test_step_0_is_a_step():
    (found,) = progress([save(0, tpb.SAVE_STATE_COMMITTED)], newest=0)
    assert (found.replicated_step, found.committed_step) == (0, 0)


def test_ranks_of_a_job_are_one_line_and_jobs_are_several():
    found = progress(
        [
            save(3, tpb.SAVE_STATE_STAGED),
            save(4, tpb.SAVE_STATE_STAGED, rank=1),
            save(9, tpb.SAVE_STATE_STAGED, job="a"),
        ],
        intervals={("gpt", 0): 2.0, ("gpt", 1): 3.0},
    )
    assert [(f.job, f.staged_step, f.interval_s) for f in found] == [("a", 9, None), ("gpt", 4, 3.0)]
