"""Commands and a small cluster for the tests of the state machine."""

import copy

from fastcheckd.registry import commands
from fastcheckd.registry.state import apply, new_state

#: What the leader's wall clock says in all of these.
AT_MS = 1_700_000_000_000


def register(node_id, life_id="life-1", *, at_ms=AT_MS, **more):
    node = {
        "node_id": node_id,
        "agent_address": f"{node_id}:1",
        "data_address": f"{node_id}:2",
        "lane_address": f"{node_id}:3",
        "voter": False,
        "ram_budget_bytes": 1 << 30,
    }
    return commands.register(node | more, life_id, at_ms=at_ms)


def set_state(node, wanted, reason="", *, at_ms=AT_MS):
    return commands.set_state(node, wanted, reason, at_ms=at_ms)


def set_draining(node_id, draining=True, *, at_ms=AT_MS):
    return commands.set_draining(node_id, draining, at_ms=at_ms)


def forget(node_id, *, at_ms=AT_MS):
    return commands.forget(node_id, at_ms=at_ms)


def open_rank(job="gpt", rank=0, world_size=2, client="c0", node=("n0", 1)):
    return commands.open_rank(job, rank, world_size, client=client, node=node)


def record(rank, session, owner, holders, state_bytes=100, *, digest="ab" * 16):
    half = state_bytes // 2
    shards = [(0, half), (half, state_bytes - half)] if half else [(0, state_bytes)]
    return {
        "rank": rank,
        "session": session,
        "owner": list(owner),
        "state_bytes": state_bytes,
        "shards": [
            {"offset": o, "bytes": b, "digest": digest, "holders": [list(h) for h in holders]}
            for o, b in shards
        ],
    }


def commit(step, ranks, world_size=2, job="gpt", **more):
    made = commands.commit(job, step, world_size, epoch=0, tolerate=1, keep_steps=2, ranks=ranks)
    return made | more


def rehold(*changes):
    return commands.rehold(changes)


def move(*, step=5, rank=0, shard=0, digest="ab" * 16, job="gpt", **more):
    return commands.holder_change(job, step, rank, shard, digest, **more)


def cluster():
    """Three nodes n0..n2 in incarnations 1..3; job gpt with ranks 0 and 1 open on n0 and n1."""
    state = new_state()
    for i in range(3):
        assert apply(state, register(f"n{i}"))["incarnation"] == i + 1
    assert apply(state, open_rank(rank=0, client="c0", node=("n0", 1)))["session"] == 1
    assert apply(state, open_rank(rank=1, client="c1", node=("n1", 2)))["session"] == 2
    return state


RANKS = [record(0, 1, ("n0", 1), [("n2", 3)]), record(1, 2, ("n1", 2), [("n2", 3)])]


def refused(state, command):
    """The refusal of a command, which must change nothing."""
    before = copy.deepcopy(state)
    result = apply(state, command)
    assert not result["ok"] and state == before
    return result
