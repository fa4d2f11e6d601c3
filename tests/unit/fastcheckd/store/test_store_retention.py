"""What may go: committed steps that are not kept, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st
from store_helpers import COPY, OWNER

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.store.retention import Kept, provisional_to_drop, what_to_drop


def replica(job: str, step: int, kind=COPY, rank: int = 0, session: int = 1):
    return kind, pb.ShardKey(job=job, step=step, rank=rank), session


def kept(*steps, void=0, next_session=0):
    return Kept(frozenset(steps), void, next_session)


def test_older_steps_go_newer_and_kept_ones_stay():
    held = [replica("a", step) for step in (1, 2, 3, 4, 5)]
    assert what_to_drop(held, {"a": kept(4, 2)}) == [replica("a", 1), replica("a", 3)]


def test_owner_and_copies_follow_the_same_rule():
    held = [replica("a", 1, OWNER), replica("a", 1, COPY, rank=1), replica("a", 2, OWNER)]
    assert what_to_drop(held, {"a": kept(2)}) == held[:2]


def test_unknown_jobs_and_jobs_without_a_commit_stay():
    held = [replica("unknown", 1), replica("young", 1)]
    assert what_to_drop(held, {"young": kept(), "other": kept(9)}) == []


def test_what_sessions_that_were_ended_made_goes_but_for_what_is_kept():
    held = [replica("a", step, session=session) for step in (3, 5, 7) for session in (1, 8)]
    gone = what_to_drop(held, {"a": kept(3, void=4, next_session=9)})
    assert gone == [replica("a", 5), replica("a", 7)]
    assert what_to_drop(held, {"a": kept(void=9, next_session=9)}) == held, "all of the job was deleted"


def test_an_old_view_says_nothing_of_what_younger_sessions_made():
    """Before step 9 was deleted; then a new run of the job saved step 5."""
    old = kept(3, 9, next_session=4)
    assert what_to_drop([replica("a", 5, session=4)], {"a": old}) == []
    assert what_to_drop([replica("a", 5, session=3)], {"a": old}) == [replica("a", 5, session=3)]


def test_what_was_superseded_goes_unless_a_newer_session_saved_it_anew():
    held = [replica("a", step, session=session) for step in (3, 6, 7) for session in (2, 5)]
    job = Kept(frozenset({3}), superseded=((7, 4),))
    assert what_to_drop(held, {"a": job}) == [replica("a", 6, session=2)]


@given(
    steps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 9))),
    jobs=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(
            Kept,
            st.frozensets(st.integers(0, 12)),
            st.integers(0, 9),
            st.sampled_from([0, 9, 9, 10]),
            st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=2).map(tuple),
        ),
    ),
)
def test_no_step_that_could_be_asked_for_goes(steps, jobs):
    held = [replica(job, step, session=session) for job, step, session in steps]
    gone = what_to_drop(held, jobs)
    for each in held:
        _, key, session = each
        job = jobs.get(key.job, Kept())
        superseded = any(key.step < step and session < below for step, below in job.superseded)
        may_be_committed = (
            not superseded
            and session >= job.void_below_session
            and (
                not job.steps
                or key.step > max(job.steps)
                or bool(job.next_session and session >= job.next_session)
            )
        )
        assert (each not in gone) == (key.step in job.steps or may_be_committed)


def provisional(step, *, owner="a", session=1, is_provisional=True):
    key = pb.ShardKey(job="gpt", step=step)
    return pb.ShardManifest(key=key, owner=owner, session=session, provisional=is_provisional)


def test_of_provisional_steps_the_newest_three_stay():
    held = [provisional(step) for step in range(2, 9)]
    assert provisional_to_drop(held, provisional(9), range(20)) == [2, 3, 4, 5]


def test_a_provisional_step_that_its_owner_may_have_reported_stays():
    held = [provisional(step) for step in range(2, 9)]
    assert provisional_to_drop(held, provisional(9), [3, 4, 8]) == [3, 4]


def test_a_step_that_was_committed_since_stays_whatever_its_owner_remembers():
    held = [provisional(step) for step in range(2, 9)]
    assert provisional_to_drop(held, provisional(9), range(20), kept_steps=[3, 5]) == [2, 4]


def test_steps_with_a_registry_and_of_others_stay():
    held = [provisional(1, is_provisional=False), provisional(2, owner="b"), provisional(3, session=2)]
    held += [provisional(step) for step in (4, 5, 6, 7)]
    assert provisional_to_drop(held, provisional(8), range(20)) == [4]
