"""Commands and a small cluster for the tests of the state machine."""

import copy

from fastcheck_proto.v1 import registry_log_pb2, registry_pb2
from fastcheckd.registry import commands
from fastcheckd.registry import state as machine
from fastcheckd.registry.model import Ref, ShardId, State

Command = registry_log_pb2.RegistryCommand
#: What the leader's wall clock says in all of these.
AT_MS = 1_700_000_000_000
DIGEST = b"\xab" * 16


def apply(state, command):
    """Apply a command as an entry of the log has it."""
    return machine.apply(state, command.SerializeToString())


def again(state):
    """The state of a voter that starts from a snapshot."""
    snapshot = machine.snapshot(state).SerializeToString(deterministic=True)
    return machine.restore(registry_log_pb2.RegistrySnapshot.FromString(snapshot))


def numbered(command, proposer, seq):
    """The command as a proposer numbers it."""
    made = Command(proposer=proposer, seq=seq)
    made.MergeFrom(command)
    return made


def node_ref(ref):
    return None if ref is None else Ref(*ref).message()


def pairs(refs):
    """Nodes in their lives, as tests write them."""
    return [(ref.node_id, ref.incarnation) for ref in refs]


def register(node_id, life_id="life-1", *, at_ms=AT_MS, **more):
    node = {
        "node_id": node_id,
        "agent_address": f"{node_id}:1",
        "data_address": f"{node_id}:2",
        "lane_address": f"{node_id}:3",
        "ram_budget_bytes": 1 << 30,
    }
    return Command(register=registry_pb2.RegisterRequest(**(node | more), life_id=life_id), at_ms=at_ms)


def set_state(node, wanted, reason="", *, at_ms=AT_MS):
    return commands.set_state(
        Ref(*node), registry_pb2.NodeState.Value(f"NODE_STATE_{wanted}"), reason, at_ms=at_ms
    )


def set_draining(node_id, draining=True, *, at_ms=AT_MS):
    asked = registry_pb2.SetDrainingRequest(node_id=node_id, draining=draining)
    return Command(set_draining=asked, at_ms=at_ms)


def forget(node_id, *, at_ms=AT_MS):
    return Command(forget=registry_pb2.ForgetRequest(node_id=node_id), at_ms=at_ms)


def open_rank(job="gpt", rank=0, world_size=2, client="c0", node=("n0", 1), **more):
    asked = registry_pb2.OpenRankRequest(
        job=job, rank=rank, world_size=world_size, client_id=client, node=node_ref(node), **more
    )
    return Command(open_rank=asked)


def record(rank, session, owner, holders, state_bytes=100, *, digest=DIGEST, **more):
    half = state_bytes // 2
    shards = [(0, half), (half, state_bytes - half)] if half else [(0, state_bytes)]
    return registry_pb2.RankRecord(
        rank=rank,
        session=session,
        owner=node_ref(owner),
        state_bytes=state_bytes,
        shards=[
            registry_pb2.ShardRecord(
                shard=index, offset=offset, bytes=size, digest=digest, holders=map(node_ref, holders)
            )
            for index, (offset, size) in enumerate(shards)
        ],
        **more,
    )


def commit(step, ranks, world_size=2, job="gpt", *, tolerate=1, keep_steps=2, at_ms=0):
    kept = registry_pb2.StepRecord(job=job, step=step, world_size=world_size, ranks=ranks)
    made = registry_log_pb2.StepCommit(record=kept, tolerate=tolerate, keep_steps=keep_steps)
    return Command(commit=made, at_ms=at_ms)


def rehold(*changes):
    return commands.rehold(changes)


def move(*, step=5, rank=0, shard=0, digest=DIGEST, job="gpt", add=None, remove=None, **more):
    return registry_log_pb2.HolderChange(
        key=ShardId(job, step, rank, shard).message(),
        digest=digest,
        add=node_ref(add),
        remove=node_ref(remove),
        **more,
    )


def mark(lost=(), held=()):
    marks = registry_log_pb2.ReplicaMarks(
        lost=[replica.message() for replica in lost], held=[replica.message() for replica in held]
    )
    return Command(mark=marks)


def delete(job, step, *, even_if_running=False):
    asked = registry_pb2.DeleteStepsRequest(job=job, step=step, even_if_running=even_if_running)
    return Command(delete=asked)


def close_rank(job, rank, session):
    return Command(close_rank=registry_pb2.CloseRankRequest(job=job, rank=rank, session=session))


def supersede(job, rank, session, owner, below_step):
    asked = registry_pb2.SupersedeRequest(
        job=job, rank=rank, session=session, owner=node_ref(owner), below_step=below_step
    )
    return Command(supersede=asked)


def upgrade(schema):
    return Command(upgrade=schema)


def cluster():
    """Three nodes n0..n2 in incarnations 1..3; job gpt with ranks 0 and 1 open on n0 and n1."""
    state = State()
    for i in range(3):
        assert apply(state, register(f"n{i}")).incarnation == i + 1
    assert apply(state, open_rank(rank=0, client="c0", node=("n0", 1))).session == 1
    assert apply(state, open_rank(rank=1, client="c1", node=("n1", 2))).session == 2
    return state


RANKS = [record(0, 1, ("n0", 1), [("n2", 3)]), record(1, 2, ("n1", 2), [("n2", 3)])]


def refused(state, command):
    """The refusal of a command, which must change nothing."""
    before = copy.deepcopy(state)
    result = apply(state, command)
    assert not result.ok and state == before
    return result


def large(size_bytes):
    """A command that changes nothing and has so many bytes, in a field that a later version may have."""
    field = registry_pb2.HistoryRequest(node_id="x" * size_bytes).SerializeToString()
    return Command(noop=registry_log_pb2.NoChange.FromString(b"\x7a" + field[1:]))
