"""What may go: committed steps that are not kept, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st
from store_helpers import COPY, OWNER

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.store.retention import provisional_to_drop, what_to_drop


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


def provisional(step, *, owner="a", session=1, is_provisional=True):
    key = pb.ShardKey(job="gpt", step=step)
    return pb.ShardManifest(key=key, owner=owner, session=session, provisional=is_provisional)


def test_of_provisional_steps_the_newest_three_stay():
    held = [provisional(step) for step in range(2, 9)]
    assert provisional_to_drop(held, provisional(9), range(20)) == [2, 3, 4, 5]


def test_a_provisional_step_that_its_owner_may_have_reported_stays():
    held = [provisional(step) for step in range(2, 9)]
    assert provisional_to_drop(held, provisional(9), [3, 4, 8]) == [3, 4]


def test_steps_with_a_registry_and_of_others_stay():
    held = [provisional(1, is_provisional=False), provisional(2, owner="b"), provisional(3, session=2)]
    held += [provisional(step) for step in (4, 5, 6, 7)]
    assert provisional_to_drop(held, provisional(8), range(20)) == [4]
