"""All commands of the state machine, each made in one place: what a leader proposes, the simulation too. Pure.

`at_ms` is the proposer's wall clock in milliseconds. It ends up in what people are shown and nothing
is ever decided by it, so it may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..config import Voter
from .owners import LOCAL
from .records import REASON_BYTES_MAX, Json
from .redundancy import RecordedReplica

#: A node in one of its lives: (node_id, incarnation), or the same as a list.
Ref = Sequence[object]


def noop() -> Json:
    """Changes nothing; that it is committed proves that its proposer leads."""
    return {"type": "noop"}


def register(node: Mapping[str, object], life_id: str, *, at_ms: int) -> Json:
    """A node starts a life. `node` as in `records.node_fields`."""
    return {"type": "register", "node": dict(node), "life_id": life_id, "at_ms": at_ms}


def set_state(node: Ref, state: str, reason: str, *, at_ms: int) -> Json:
    """UP, DRAINING or DOWN. The reason may be any text; what does not fit is left out."""
    plain = "".join(c if c.isascii() and c.isprintable() else "?" for c in reason)
    return {
        "type": "set_state",
        "node": list(node),
        "state": state,
        "reason": plain[:REASON_BYTES_MAX],
        "at_ms": at_ms,
    }


def set_draining(node_id: str, draining: bool, *, at_ms: int) -> Json:
    """Begin or end a drain."""
    return {"type": "set_draining", "node_id": node_id, "draining": draining, "at_ms": at_ms}


def forget(node_id: str, *, at_ms: int) -> Json:
    """Take a DOWN node off the list."""
    return {"type": "forget", "node_id": node_id, "at_ms": at_ms}


def set_voters(voters: Iterable[Voter], *, at_ms: int) -> Json:
    """Name the voters that everyone goes by."""
    return {
        "type": "set_voters",
        "voters": [[v.node_id, v.registry_address, v.raft_address] for v in voters],
        "at_ms": at_ms,
    }


def open_rank(
    job: str,
    rank: int,
    world_size: int,
    *,
    client: str,
    node: Ref,
    replaces: int | None = None,
    identity: str = LOCAL,
    loads: bool = False,
    renews: int = 0,
) -> Json:
    """A process takes a rank's place; unless that is None, only from the session that it `replaces`.

    Args:
        identity: who it is; the job's first one owns it.
        loads: it takes the place to load.
        renews: the session of the same process that is to be followed by another one; 0: none.
    """
    return {
        "type": "open_rank",
        "job": job,
        "rank": rank,
        "world_size": world_size,
        "client": client,
        "node": list(node),
        "replaces": replaces,
        "identity": identity,
        **({"loads": True} if loads else {}),
        **({"renews": renews} if renews else {}),
    }


def commit(
    job: str,
    step: int,
    world_size: int,
    *,
    epoch: int,
    tolerate: int,
    keep_steps: int,
    ranks: Sequence[Json],
    at_ms: int | None = None,
) -> Json:
    """All ranks of a step are replicated."""
    return {
        "type": "commit",
        "job": job,
        "step": step,
        "world_size": world_size,
        "epoch": epoch,
        "tolerate": tolerate,
        "keep_steps": keep_steps,
        "ranks": list(ranks),
        **({} if at_ms is None else {"at_ms": at_ms}),
    }


def holder_change(
    job: str,
    step: int,
    rank: int,
    shard: int,
    digest: str,
    *,
    kind: str = "copy",
    add: Ref | None = None,
    remove: Ref | None = None,
    absent: Iterable[int] = (),
) -> Json:
    """One change in a `rehold`: of a copy's holder or, with kind `owner`, of the owner's life.

    `absent` are shards of the rank that the owner does not have in this life.
    """
    return {
        "job": job,
        "step": step,
        "rank": rank,
        "shard": shard,
        "digest": digest,
        "kind": kind,
        "add": None if add is None else list(add),
        "remove": None if remove is None else list(remove),
        "absent": list(absent),
    }


def rehold(changes: Iterable[Json]) -> Json:
    """Committed shards have other holders: at most `holders.CHANGES_MAX` changes."""
    return {"type": "rehold", "changes": list(changes)}


def delete(job: str, step: int | None, *, even_if_running: bool = False) -> Json:
    """A committed step, or (None) all of a job, is kept no more."""
    return {"type": "delete", "job": job, "step": step, "even_if_running": even_if_running}


def close_rank(job: str, rank: int, session: int) -> Json:
    """The process that has this session is done."""
    return {"type": "close_rank", "job": job, "rank": rank, "session": session}


def supersede(job: str, rank: int, session: int, owner: Ref, below_step: int) -> Json:
    """Steps of a job below `below_step` that are not committed never will be."""
    return {
        "type": "supersede",
        "job": job,
        "rank": rank,
        "session": session,
        "owner": list(owner),
        "below_step": below_step,
    }


def upgrade(schema: int) -> Json:
    """All voters know a newer schema of the state."""
    return {"type": "upgrade", "schema": schema}


def mark(lost: Iterable[RecordedReplica] = (), held: Iterable[RecordedReplica] = ()) -> Json:
    """Nodes no longer have replicas, or have them after all: at most `holders.MARKED_MAX` of each."""
    return {
        "type": "mark",
        "lost": [[*replica.shard, *replica.ref] for replica in lost],
        "held": [[*replica.shard, *replica.ref] for replica in held],
    }
