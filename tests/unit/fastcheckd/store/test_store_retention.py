"""What may go: committed steps that are not kept, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st
from store_helpers import COPY, OWNER

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.store.retention import what_to_drop


def replica(job: str, step: int, kind=COPY, rank: int = 0):
    return kind, pb.ShardKey(job=job, step=step, rank=rank)


def test_older_steps_go_newer_and_kept_ones_stay():
    held = [replica("a", step) for step in (1, 2, 3, 4, 5)]
    assert what_to_drop(held, {"a": [4, 2]}) == [replica("a", 1), replica("a", 3)]


def test_owner_and_copies_follow_the_same_rule():
    held = [replica("a", 1, OWNER), replica("a", 1, COPY, rank=1), replica("a", 2, OWNER)]
    assert what_to_drop(held, {"a": [2]}) == held[:2]


def test_unknown_jobs_and_jobs_without_a_commit_stay():
    held = [replica("unknown", 1), replica("young", 1)]
    assert what_to_drop(held, {"young": [], "other": [9]}) == []


@given(
    steps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12))),
    kept=st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 12))),
)
def test_no_step_that_could_be_asked_for_goes(steps, kept):
    held = [replica(job, step) for job, step in steps]
    gone = what_to_drop(held, kept)
    for kind, key in held:
        committed = kept.get(key.job, [])
        needed = not committed or key.step in committed or key.step > max(committed)
        assert ((kind, key) not in gone) == needed
