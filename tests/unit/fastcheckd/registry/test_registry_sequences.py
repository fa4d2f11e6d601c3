"""Whatever the log holds: what must be true of the state machine after any commands in any order."""

import copy
from dataclasses import replace

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fastcheckd.registry.small_cluster import (
    DIGEST,
    RANKS,
    Command,
    again,
    apply,
    close_rank,
    cluster,
    commit,
    delete,
    forget,
    mark,
    move,
    numbered,
    open_rank,
    record,
    register,
    rehold,
    set_draining,
    set_state,
    supersede,
    upgrade,
)

import fastcheckd.registry.state as machine
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.config import Voter
from fastcheckd.registry.commands import noop, set_voters
from fastcheckd.registry.model import DOWN, DRAINING, SCHEMA, UNKNOWN, Ref, ShardId, live
from fastcheckd.registry.nodes import HISTORY_MAX
from fastcheckd.registry.redundancy import RecordedReplica

nodes = st.sampled_from(["n0", "n1", "n2", "n3"])
refs = st.tuples(nodes, st.integers(1, 8)).map(list)
rank_records = st.builds(
    record,
    st.integers(0, 2),
    st.integers(1, 6),
    refs,
    st.lists(refs, min_size=1, max_size=2),
    st.sampled_from([0, 100]),
)
changes = st.builds(
    lambda step, rank, shard, digest, of_owner, add, remove: move(
        step=step, rank=rank, shard=shard, digest=digest, of_owner=of_owner, add=add, remove=remove
    ),
    st.sampled_from([2, 3, 3, 6]),
    st.integers(0, 1),
    st.integers(0, 2),
    st.sampled_from([DIGEST, DIGEST, b"\xcd" * 16]),
    st.sampled_from([False, False, True]),
    st.none() | refs,
    st.none() | refs,
)
replicas = st.builds(
    lambda step, rank, shard, ref: RecordedReplica(ShardId("gpt", step, rank, shard), Ref(*ref)),
    st.sampled_from([2, 3, 6]), st.integers(0, 1), st.integers(0, 2), refs,
)  # fmt: skip
voters = st.builds(
    lambda ids: [Voter(node_id=n, registry_address=f"{n}:5", raft_address=f"{n}:6") for n in ids],
    st.lists(nodes, max_size=3),
)
times = st.integers(0, 99)
whole_commands = st.one_of(
    st.builds(register, nodes, st.sampled_from(["l1", "l2"]), at_ms=times),
    st.builds(set_state, refs, st.sampled_from(["UP", "DOWN", "DRAINING"]), st.sampled_from(["", "left"])),
    st.builds(set_draining, nodes, st.booleans()),
    st.builds(forget, nodes),
    st.builds(set_voters, voters, at_ms=times),
    st.builds(
        open_rank,
        st.just("gpt"),
        st.integers(0, 1),
        st.integers(1, 2),
        st.sampled_from(["c0", "c1", "c2"]),
        refs,
    ),
    st.builds(commit, st.integers(0, 9), st.lists(rank_records, max_size=2), st.integers(1, 2)),
    st.just(commit(3, RANKS)),
    st.just(commit(6, RANKS)),
    st.builds(lambda these: rehold(*these), st.lists(changes, max_size=4)),
    st.builds(delete, st.just("gpt"), st.none() | st.integers(0, 9), even_if_running=st.booleans()),
    st.builds(close_rank, st.just("gpt"), st.integers(0, 1), st.integers(0, 6)),
    st.builds(supersede, st.just("gpt"), st.integers(0, 1), st.integers(0, 6), refs, st.integers(0, 9)),
    st.builds(mark, st.lists(replicas, max_size=3), st.lists(replicas, max_size=3)),
    st.just(upgrade(SCHEMA)),
    st.just(noop()),
)


@st.composite
def entries(draw):
    """A command with its proposer and number; or one with bytes that are cut off, repeated or changed."""
    data = numbered(draw(whole_commands), "p", draw(st.integers(0, 40))).SerializeToString()
    if draw(st.integers(0, 3)):
        return data
    spoiled = bytearray(data)
    for at in draw(st.lists(st.integers(0, len(data) - 1), max_size=3)):
        spoiled[at] = draw(st.integers(0, 255))
    return bytes(spoiled[: draw(st.integers(0, len(data)))]) + draw(st.binary(max_size=5))


def live_copies(state, owner, holders):
    return sum(live(state, ref) for ref in [owner, *holders])


def shards_of(state):
    """(step, rank, shard) -> (owner, holders) of all that is kept."""
    return {
        (kept.step, record.rank, index): (Ref.of(record.owner), list(map(Ref.of, shard.holders)))
        for kept in state.jobs["gpt"].steps
        for record in kept.ranks
        for index, shard in enumerate(record.shards)
    }


def bytes_of(kept):
    """A committed step without what may change in it: who holds it."""
    known = copy.deepcopy(kept)
    known.ClearField("copies")
    for rank in known.ranks:
        rank.owner.ClearField("incarnation")
        for shard in rank.shards:
            shard.ClearField("holders")
            shard.ClearField("lost")
    return known


def check_replicas(state, was, *, may_lose):
    """Never two copies of a shard on one node, LOST is only what the record names, and a change costs no live copy."""
    for kept in state.jobs["gpt"].steps:
        for rank in kept.ranks:
            for shard in rank.shards:
                refs = {Ref.of(rank.owner), *map(Ref.of, shard.holders)}
                lost = list(map(Ref.of, shard.lost))
                assert len({ref.node_id for ref in refs}) == 1 + len(shard.holders)
                assert set(lost) <= refs and len(set(lost)) == len(lost)
    if not may_lose:
        for key, (owner, holders) in shards_of(state).items():
            assert live_copies(state, owner, holders) >= live_copies(state, *was[key])


def check_nodes(state):
    for node in state.nodes.values():
        assert node.state == DOWN or node.draining == (node.state == DRAINING)
        assert node.incarnation < state.next_incarnation
    epochs = [entry.epoch for entry in state.history]
    assert epochs == sorted(set(epochs)) and len(epochs) <= HISTORY_MAX
    assert not epochs or epochs[-1] == state.epoch
    last = {entry.node.node_id: entry for entry in state.history}
    for node_id, entry in last.items():
        known = state.nodes.get(node_id)
        assert entry.to == (UNKNOWN if known is None else known.state), "history ends with what is"


@settings(max_examples=250, deadline=None)
@given(st.lists(entries(), max_size=25))
def test_no_sequence_of_commands_raises_or_goes_back(sequence):
    state = cluster()
    assert apply(state, commit(2, RANKS)).ok
    assert apply(state, register("n3")).ok
    replica = again(state)
    committed = {}
    for entry in sequence:
        before = copy.deepcopy(state)
        result = machine.apply(state, entry)
        assert result.code != pb.ERROR_CODE_INTERNAL, result
        if not result.ok:
            assert replace(state, seen={}) == replace(before, seen={}), "a refusal changes nothing"
        # Another voter, restored from a snapshot on the way, comes to the same state.
        replica = again(replica)
        assert machine.apply(replica, entry) == result
        assert snapshot_of(replica) == snapshot_of(state), "in the same order, too"
        job = state.jobs["gpt"]
        earlier = before.jobs["gpt"]
        assert (job.void, job.newest) >= (earlier.void, earlier.newest), "only a deletion takes a job back"
        assert state.epoch >= before.epoch and state.version >= before.version
        steps = [kept.step for kept in job.steps]
        assert steps == sorted(set(steps)) and len(steps) <= 2 and (not steps or steps[-1] == job.newest)
        for kept in job.steps:
            known = bytes_of(kept)
            # After a deletion another session may save the same number anew.
            step_of = kept.step, *(rank.session for rank in kept.ranks)
            assert committed.setdefault(step_of, known) == known, "a committed step never changes"
            assert [r.rank for r in kept.ranks] == list(range(kept.world_size))
            assert kept.copies == min(len(s.holders) for r in kept.ranks for s in r.shards)
        check_nodes(state)
        check_replicas(state, shards_of(before), may_lose=not is_rehold(entry))


def snapshot_of(state):
    return machine.snapshot(state).SerializeToString(deterministic=True)


def is_rehold(entry):
    try:
        return Command.FromString(entry).HasField("rehold")
    except DecodeError:
        return False


#: What befalls a small cluster, told without incarnations: those are the current ones when it happens.
happenings = st.one_of(
    st.tuples(st.just("register"), nodes),
    st.tuples(st.just("down"), nodes),
    st.tuples(st.just("drain"), nodes, st.booleans()),
    *(
        st.tuples(
            st.just("rehold"),
            st.sampled_from([False, False, False, True]),
            st.integers(0, 1),
            st.none() | nodes,
            st.none() | nodes,
        )
        for _ in range(3)
    ),
)


def command_of(state, count, what, *details):
    if what == "register":
        return register(details[0], f"life-{count}")
    if what == "drain":
        return set_draining(*details)
    if what == "down":
        return set_state([details[0], state.nodes[details[0]].incarnation], "DOWN", "silent")
    of_owner, rank, add, remove = details
    held = shards_of(state)[2, rank, 0][1]
    return rehold(
        move(
            step=2,
            rank=rank,
            of_owner=of_owner,
            add=None if add is None else Ref.of(state.nodes[add]),
            remove=next((holder for holder in held if holder.node_id == remove), None),
        )
    )


@settings(max_examples=400, deadline=None)
@given(st.lists(happenings, min_size=1, max_size=20))
def test_no_change_of_holders_costs_a_live_copy_or_puts_two_on_a_node(sequence):
    state = cluster()
    assert apply(state, register("n3")).ok
    assert apply(state, commit(2, RANKS)).ok
    for count, happening in enumerate(sequence):
        before = copy.deepcopy(state)
        command = command_of(state, count, *happening)
        result = apply(state, command)
        assert result.code != pb.ERROR_CODE_INTERNAL, result
        rehold_only = command.HasField("rehold")
        if rehold_only and any(result.why):
            assert state == before, "a refused change changes nothing"
        was = shards_of(before)
        check_replicas(state, was, may_lose=not rehold_only)
        for key, (_, holders) in shards_of(state).items():
            if rehold_only:
                assert all(live(state, ref) for ref in holders if ref not in was[key][1])
        (kept,) = state.jobs["gpt"].steps
        assert kept.copies == min(len(s.holders) for r in kept.ranks for s in r.shards)
        check_nodes(state)
