"""Copies that are gone although a record names them: their nodes have taken the claim back. Pure.

They are part of the replicated state: a new leader that did not know of them would count copies that nobody has.
A claim is denied until its node says that it has the bytes again, or the record names it no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX

from .records import SHARDS_MAX, Json, MalformedError, integer, name, node_ref
from .redundancy import Claim, Ref, ShardId, find_shard

#: Claims in one command.
CLAIMS_MAX = 1000
#: What is beyond that is told again by the next audit. Their nodes have lost nearly all of their memory.
DENIALS_MAX = 20_000


def deny(state: Json, command: Json) -> Json:
    """Nodes do not hold what is `gone`, and do hold what is `held`; forgets what no record claims any more.

    Raises:
        MalformedError: nothing has changed.
    """
    gone, held = _claims(command, "gone"), set(_claims(command, "held"))
    # A new list, not the old one changed: whoever keeps what was computed from it sees that it is another.
    state["denied"] = [to_json(claim) for claim in _listed(state) if claim not in held]
    add_denials(state, gone)
    return {"ok": True}


def add_denials(state: Json, gone: Iterable[Claim]) -> None:
    """Deny these claims, as far as records make them."""
    known = dict.fromkeys(claim for claim in _listed(state) if is_claimed(state, claim))
    known |= dict.fromkeys(claim for claim in gone if is_claimed(state, claim))
    state["denied"] = [to_json(claim) for claim in list(known)[:DENIALS_MAX]]


def denied_in(state: Json) -> frozenset[Claim]:
    """The denied claims that records still make, in lives that last."""
    return frozenset(claim for claim in _listed(state) if is_claimed(state, claim))


def is_claimed(state: Json, claim: Claim) -> bool:
    """Whether a record names this life of the node as one that holds the shard."""
    node = state["nodes"].get(claim.ref.node_id)
    if node is None or node["incarnation"] != claim.ref.incarnation:
        return False
    if (found := find_shard(state, claim.shard)) is None:
        return False
    record, shard = found
    return list(claim.ref) in (record["owner"], *shard["holders"])


def to_json(claim: Claim) -> list[Any]:
    """As commands and state have it: job, step, rank, shard, node, incarnation."""
    return [*claim.shard, *claim.ref]


def _listed(state: Json) -> Iterator[Claim]:
    return (Claim(ShardId(*entry[:4]), Ref(*entry[4:])) for entry in state["denied"])


def _claims(command: Json, key: str) -> list[Claim]:
    given = command.get(key)
    if not isinstance(given, list) or len(given) > CLAIMS_MAX:
        raise MalformedError(f"{key} must be a list of at most {CLAIMS_MAX} claims")
    return [_claim(value) for value in given]


def _claim(value: Any) -> Claim:
    if not isinstance(value, list) or len(value) != 6:
        raise MalformedError("a claim is a list of job, step, rank, shard, node and incarnation")
    fields = dict(zip(("job", "step", "rank", "shard"), value[:4], strict=True))
    shard_id = ShardId(
        name(fields, "job"),
        integer(fields, "step", 0, STEP_MAX),
        integer(fields, "rank", 0, RANK_MAX - 1),
        integer(fields, "shard", 0, SHARDS_MAX - 1),
    )
    return Claim(shard_id, Ref(*node_ref(value[4:], "the node of a claim")))
