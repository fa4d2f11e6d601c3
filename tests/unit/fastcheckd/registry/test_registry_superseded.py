"""A step that a rank has given up is never committed, by nobody's report; newer ones and newer sessions are free."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fastcheckd.registry.small_cluster import (
    RANKS,
    again,
    apply,
    cluster,
    commit,
    delete,
    open_rank,
    pairs,
    record,
    refused,
)
from tests.unit.fastcheckd.registry.small_cluster import supersede as made

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.registry.commits import Standing, standing
from fastcheckd.registry.deletion import BOUNDS_MAX
from fastcheckd.registry.view import job_views


def supersede(below_step, rank=0, session=1, owner=("n0", 1)):
    return made("gpt", rank, session, owner, below_step)


def owner_of(rank):
    (owner,) = pairs([RANKS[rank].owner])
    return owner


def restarted(state, life):
    """New processes of both ranks; their records."""
    sessions = [
        apply(state, open_rank(rank=r, client=f"{life}-{r}", node=owner_of(r))).session for r in (0, 1)
    ]
    return [record(r, sessions[r], owner_of(r), [("n2", 3)]) for r in (0, 1)]


def test_one_ranks_word_rules_a_step_out_for_all():
    state = cluster()
    assert apply(state, commit(3, RANKS)).ok
    assert apply(state, supersede(7)).kept == [3]
    for step in (4, 6):
        assert refused(state, commit(step, RANKS)).code == pb.ERROR_CODE_SUPERSEDED
        for rank in RANKS:
            assert standing(state.jobs["gpt"], step, rank.rank, rank.session) is Standing.SUPERSEDED
    assert apply(state, commit(7, RANKS)).ok
    assert standing(state.jobs["gpt"], 3, 0, 1, RANKS[0]) is Standing.COMMITTED


def test_whoever_asks_late_is_told_what_was_committed_before():
    state = cluster()
    assert apply(state, commit(5, RANKS)).ok
    version = state.version
    assert apply(state, supersede(6)).kept == [5]
    assert state.version == version and not state.jobs["gpt"].superseded, "a commit says as much"


def test_a_job_that_restarts_uses_the_numbers_again():
    state = cluster()
    assert apply(state, commit(3, RANKS)).ok
    assert apply(state, supersede(40)).ok
    records = restarted(state, "second")
    assert apply(state, commit(4, records)).ok
    assert apply(state, supersede(9, session=records[0].session)).ok
    assert refused(state, commit(8, records)).code == pb.ERROR_CODE_SUPERSEDED
    assert apply(state, commit(9, records)).ok


def test_only_the_process_that_speaks_for_the_rank_may():
    state = cluster()
    assert refused(state, supersede(7, session=2)).code == pb.ERROR_CODE_FENCED
    assert refused(state, supersede(7, owner=("n0", 9))).code == pb.ERROR_CODE_INCARNATION_OVER
    assert refused(state, made("other", 0, 1, ("n0", 1), 7)).code == pb.ERROR_CODE_FENCED
    restarted(state, "second")
    assert refused(state, supersede(7)).code == pb.ERROR_CODE_FENCED


def test_the_view_tells_holders_what_they_may_drop():
    state = cluster()
    assert apply(state, supersede(7)).ok
    (view,) = job_views(state)
    assert [(each.below_step, each.below_session) for each in view.superseded] == [(7, 3)]
    assert view.live_from_session == 1
    restarted(state, "second")
    (view,) = job_views(again(state))
    assert view.live_from_session == 3, "nothing of the first processes can be committed"


def test_deleting_the_job_forgets_it():
    state = cluster()
    assert apply(state, supersede(7)).ok
    assert apply(state, delete("gpt", None, even_if_running=True)).ok
    assert not state.jobs["gpt"].superseded
    assert apply(state, commit(4, restarted(state, "second"))).ok


happenings = st.one_of(
    st.tuples(st.just("supersede"), st.integers(0, 1), st.integers(0, 12)),
    st.tuples(st.just("commit"), st.integers(0, 12)),
    st.tuples(st.just("open"), st.integers(0, 1)),
    st.tuples(st.just("restart")),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(happenings, max_size=40))
def test_what_was_ruled_out_is_never_committed_later(sequence):
    state = cluster()
    records = {rank.rank: rank for rank in RANKS}
    #: Pairs of a step and a session that were ruled out while they were not committed.
    ruled_out = set()

    def open_anew(rank, count):
        owner = owner_of(rank)
        result = apply(state, open_rank(rank=rank, client=f"c-{count}-{rank}", node=owner))
        records[rank] = record(rank, result.session, owner, [("n2", 3)])

    for count, (what, *details) in enumerate(sequence):
        job = state.jobs["gpt"]
        if what == "open":
            open_anew(details[0], count)
        elif what == "restart":
            open_anew(0, count), open_anew(1, count)
        elif what == "supersede":
            rank, below = details
            result = apply(state, supersede(below, rank, records[rank].session, owner_of(rank)))
            assert result.ok, result
            newest = job.newest
            ruled_out |= {(s, n) for s in range(newest + 1, below) for n in range(job.next_session)}
            assert len(job.superseded) <= BOUNDS_MAX
        else:
            before = job.newest
            done = apply(state, commit(details[0], [records[0], records[1]])).ok
            sessions = {records[0].session, records[1].session}
            if done and details[0] > before:
                assert not any((details[0], session) in ruled_out for session in sessions)
            if not done and details[0] > before:
                wide = len(job.superseded) == BOUNDS_MAX
                assert wide or any((details[0], session) in ruled_out for session in sessions), (
                    "refused for nothing"
                )
