"""What somebody deleted stays deleted, what he did not stays, and a running job is asked about."""

import copy

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.fastcheckd.registry.small_cluster import (
    RANKS,
    again,
    apply,
    close_rank,
    cluster,
    commit,
    delete,
    forget,
    open_rank,
    record,
    refused,
    register,
    set_state,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.registry.commits import Standing, standing
from fastcheckd.registry.deletion import plan_deletion
from fastcheckd.registry.sessions import current_session, is_vacant
from fastcheckd.registry.view import job_views


def committed(*steps):
    state = cluster()
    for step in steps:
        assert apply(state, commit(step, RANKS, keep_steps=len(steps))).ok
    return state


def closed(state):
    for rank, session in ((0, 1), (1, 2)):
        assert apply(state, close_rank("gpt", rank, session)).ok
    return state


def steps_of(state):
    return [kept.step for kept in state.jobs["gpt"].steps]


def test_an_older_step_goes_while_the_job_runs_and_nothing_else_changes():
    state = committed(3, 5, 7)
    before = copy.deepcopy(state)
    result = apply(state, delete("gpt", 5))
    assert (result.deleted, result.kept, result.ends_sessions) == ([5], [3, 7], False)
    assert steps_of(state) == [3, 7] and state.version == before.version + 1
    after = copy.deepcopy(state)
    after.version, after.jobs["gpt"].steps = before.version, before.jobs["gpt"].steps
    assert after == before, "nobody is fenced"
    # Its late report is right all the same: it was committed.
    assert standing(state.jobs["gpt"], 5, 0, 1, RANKS[0]) is Standing.COMMITTED
    assert refused(state, commit(5, RANKS)).code == pb.ERROR_CODE_NOT_NEWER
    assert apply(state, commit(8, RANKS, keep_steps=3)).ok


def test_a_running_job_keeps_what_it_would_be_restored_from_unless_told_otherwise():
    state = committed(3, 5)
    for step in (5, None):
        no = refused(state, delete("gpt", step))
        assert no.code == pb.ERROR_CODE_UNSAFE and "rank 0, 1 on n0, n1" in no.message
    assert apply(state, delete("gpt", 5, even_if_running=True)).deleted == [5]


@pytest.mark.parametrize("gone", ["closed", "down", "forgotten"])
def test_trainers_that_are_done_or_on_lost_nodes_do_not_hold_it_up(gone):
    state = committed(3, 5)
    for rank, (node, incarnation) in enumerate((("n0", 1), ("n1", 2))):
        assert not apply(state, delete("gpt", 5)).ok, "one of them is still there"
        if gone == "closed":
            assert apply(state, close_rank("gpt", rank, rank + 1)).ok
        else:
            assert apply(state, set_state([node, incarnation], "DOWN")).ok
            if gone == "forgotten":
                assert apply(state, forget(node)).ok
    assert apply(state, delete("gpt", 5)).kept == [3]


def test_a_seat_is_closed_by_its_own_session_alone_and_opened_by_whoever_goes_on():
    state = committed(3)
    before = copy.deepcopy(state)
    for job, rank, session in (("gpt", 0, 2), ("gpt", 0, 0), ("gpt", 7, 1), ("other", 0, 1)):
        assert apply(state, close_rank(job, rank, session)).ok
        assert state == before
    closed(state)
    assert plan_deletion(state, "gpt", 3).running == ()
    # Closing fences nobody.
    assert apply(state, commit(4, RANKS)).ok
    assert apply(state, open_rank(rank=0, client="c0")).session == 1
    assert apply(state, open_rank(rank=1, client="new", node=("n1", 2))).session == 3
    assert plan_deletion(state, "gpt", 4).running == (0, 1)


def test_without_the_newest_step_the_job_goes_back_and_its_processes_are_over():
    state = closed(committed(3, 5))
    result = apply(state, delete("gpt", 5))
    assert (result.deleted, result.kept, result.ends_sessions) == ([5], [3], True)
    job = state.jobs["gpt"]
    assert (job.newest, steps_of(state)) == (3, [3])
    for rank in RANKS:
        assert job.ranks[rank.rank].session > rank.session
        assert job.void > rank.session
    # Nothing of theirs comes back: not the step, not a later one.
    assert refused(state, commit(5, RANKS)).code == pb.ERROR_CODE_FENCED
    assert refused(state, commit(9, RANKS)).code == pb.ERROR_CODE_FENCED
    assert standing(job, 3, 0, 1) is not Standing.OPEN
    # Who comes next may use the number again.
    sessions = [
        apply(state, open_rank(rank=r, client=f"next{r}", node=(f"n{r}", r + 1))).session for r in (0, 1)
    ]
    anew = [
        record(0, sessions[0], ("n0", 1), [("n2", 3)], digest=b"\xcd" * 16),
        record(1, sessions[1], ("n1", 2), [("n2", 3)], digest=b"\xcd" * 16),
    ]
    assert min(sessions) >= job.void
    assert refused(state, open_rank(rank=0, client="c0")).code == pb.ERROR_CODE_FENCED, (
        "they have a successor now"
    )
    assert apply(state, commit(4, anew)).ok and apply(state, commit(5, anew)).ok


def test_all_of_a_job_goes_and_it_may_begin_anew_from_its_first_step():
    state = closed(committed(3, 5, 7))
    assert apply(state, delete("gpt", None)).deleted == [3, 5, 7]
    job = state.jobs["gpt"]
    assert job.steps == [] and job.newest == -1 and job.recent == []
    assert standing(job, 7, 0, 1) is Standing.OPEN, "and then its session is found to be over"
    sessions = [
        apply(state, open_rank(rank=r, client=f"next{r}", node=(f"n{r}", r + 1))).session for r in (0, 1)
    ]
    first = [record(0, sessions[0], ("n0", 1), [("n2", 3)]), record(1, sessions[1], ("n1", 2), [("n2", 3)])]
    assert apply(state, commit(0, first)).ok


def test_a_job_that_never_committed_can_be_deleted_too():
    state = closed(cluster())
    assert apply(state, delete("gpt", None)).ends_sessions
    assert refused(state, commit(1, RANKS)).code == pb.ERROR_CODE_FENCED


def test_deletion_may_be_repeated_and_what_is_not_there_is_nothing_to_delete():
    state = closed(committed(3, 5, 7))
    for step in (3, 7, None):
        assert apply(state, delete("gpt", step)).ok
        before = copy.deepcopy(state)
        assert apply(state, delete("gpt", step)).deleted == []
        assert state == before
    result = apply(state, delete("unknown", None))
    assert result.ok and not result.deleted and not result.kept and not result.ends_sessions


@pytest.mark.parametrize("bad", [("/", 3), ("gpt", 1 << 63)])
def test_malformed_deletions_are_refused(bad):
    assert refused(committed(3), delete(*bad)).code == pb.ERROR_CODE_INVALID


def test_the_view_tells_what_is_void_and_who_runs():
    state = committed(3, 5)
    (job,) = job_views(state)
    assert (job.void_below_session, job.next_session, job.running_ranks) == (0, 3, 2)
    apply(closed(state), delete("gpt", 5))
    (job,) = job_views(state)
    assert list(job.kept_steps) == [3] and job.running_ranks == 0
    assert job.void_below_session == job.next_session == 5


def test_a_job_that_was_forgotten_and_comes_back_knows_that_all_before_is_void():
    state = closed(cluster())
    state.session_floor = 9
    apply(state, open_rank(job="again", rank=0, client="c", node=("n0", 1)))
    assert (state.jobs["again"].void, state.jobs["again"].next_session) == (9, 10)


actions = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 1), st.integers(0, 5)),
    st.tuples(st.just("close"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("commit"), st.integers(0, 12), st.integers(1, 3)),
    st.tuples(st.just("late"), st.integers(0, 12), st.integers(0, 30)),
    st.tuples(st.just("delete"), st.none() | st.integers(0, 12), st.booleans()),
    st.tuples(st.just("down"), st.integers(0, 2), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(actions, max_size=40))
@example([("commit", 0, 1), ("commit", 1, 1), ("delete", 1, True), ("delete", None, False)])
def test_whatever_happens_what_is_deleted_stays_so_and_nothing_else_goes(sequence):
    state = cluster()
    lives = {f"n{i}": i + 1 for i in range(3)}
    kept, deleted, tried = [], set(), []
    for kind, one, other in sequence:
        job = state.jobs["gpt"]
        sessions = [job.ranks[rank].session for rank in (0, 1)]
        if kind == "open":
            client = f"client-{other}"
            apply(state, open_rank(rank=one, client=client, node=(f"n{one}", lives[f"n{one}"])))
        elif kind == "close":
            apply(state, close_rank("gpt", one, sessions[one]))
        elif kind == "down":
            node = f"n{one}"
            apply(state, set_state([node, lives[node]], "DOWN"))
            lives[node] = apply(state, register(node, f"life-{len(tried)}-{lives[node]}")).incarnation
        elif kind in ("commit", "late"):
            if kind == "late" and tried:
                command = tried[other % len(tried)]
            else:
                ranks = [
                    record(r, sessions[r], (f"n{r}", lives[f"n{r}"]), [("n2", lives["n2"])]) for r in (0, 1)
                ]
                command = commit(one, ranks, keep_steps=3)
                tried.append(command)
            saved = command.commit.record
            save = (saved.step, tuple(rank.session for rank in saved.ranks))
            if apply(state, command).ok:
                assert save not in deleted
                if save not in kept:
                    assert not kept or save[0] > kept[-1][0]
                    kept = [*kept, save][-3:]
        else:
            result = apply(state, delete("gpt", one, even_if_running=other))
            assert result.ok or (not other and plan_deletion(state, "gpt", one).running)
            if result.ok:
                going = [save for save in kept if one in (None, save[0])]
                assert result.deleted == [step for step, _ in going]
                deleted |= set(going)
                kept = [save for save in kept if save not in going]
        found = [(k.step, tuple(r.session for r in k.ranks)) for k in state.jobs["gpt"].steps]
        assert found == kept
        job = state.jobs["gpt"]
        assert job.newest == (kept[-1][0] if kept else -1)
        assert all(max(sessions) < job.void or step < job.newest for step, sessions in deleted)
        assert again(state) == state


def test_a_process_that_lost_its_place_to_a_deletion_has_it_again_and_no_earlier_one_does():
    state = committed(3)

    def take(client, **replaces):
        return apply(state, open_rank(client=client, node=("n0", 1), **replaces))

    def deleted():
        assert apply(state, delete("gpt", None, even_if_running=True)).ends_sessions

    take("mine")
    assert is_vacant(state, "gpt", 0, "mine") and not is_vacant(state, "gpt", 0, "c0")
    sessions = []
    for _ in range(6):  # more often than former clients are remembered
        late = current_session(state, "gpt", 0)
        deleted()
        assert is_vacant(state, "gpt", 0, "mine") and not is_vacant(state, "gpt", 0, "c0")
        assert take("mine", replaces=late).session == 0, "from before the deletion, and late"
        assert refused(state, open_rank(client="c0", node=("n0", 1))).code == pb.ERROR_CODE_FENCED
        sessions.append(take("mine").session)
        assert take("mine").session == sessions[-1], "an answer that was lost is asked for again"
    assert sessions == sorted(set(sessions))
    deleted()
    assert take("newer").session
    assert not is_vacant(state, "gpt", 0, "mine")
    deleted()
    assert refused(state, open_rank(client="mine", node=("n0", 1))).code == pb.ERROR_CODE_FENCED
    assert is_vacant(state, "unknown", 0, "mine"), "what is forgotten nobody has"
