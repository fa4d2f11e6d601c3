"""Between the registry's messages and its JSON. Pure translation; `records` does the checking."""

from __future__ import annotations

from typing import Any

from fastcheck_proto.v1 import common_pb2, node_pb2, registry_pb2

from ..config import Voter
from .records import Json
from .shared_state import Disagreement, is_replicated
from .view import state_value


def node_ref(ref: common_pb2.NodeRef) -> list[object]:
    """[node_id, incarnation]."""
    return [ref.node_id, ref.incarnation]


def node_fields(request: registry_pb2.RegisterRequest) -> Json:
    """What a node says about itself, as a command holds it."""
    return {
        "node_id": request.node_id,
        "agent_address": request.agent_address,
        "data_address": request.data_address,
        "lane_address": request.lane_address,
        "voter": request.voter,
        "ram_budget_bytes": request.ram_budget_bytes,
        "labels": dict(request.labels),
    }


def rank_record(record: registry_pb2.RankRecord) -> Json:
    """A rank's record as a command holds it; shards are in order of their number."""
    shards = sorted(record.shards, key=lambda shard: shard.shard)
    return {
        "rank": record.rank,
        "session": record.session,
        "owner": node_ref(record.owner),
        "state_bytes": record.state_bytes,
        "shards": [
            {
                "offset": shard.offset,
                "bytes": shard.bytes,
                "digest": shard.digest.hex(),
                "holders": [node_ref(holder) for holder in shard.holders],
            }
            for shard in shards
        ],
        "lossy": record.lossy,
        "shared": shared_fields(record.shared) if record.HasField("shared") else None,
    }


def shared_fields(part: common_pb2.SharedPart) -> Json:
    """A part of a shared state as a record holds it."""
    return {
        "bytes": part.shared_bytes,
        "start": part.start,
        "stop": part.stop,
        "layout": part.layout_digest.hex(),
    }


def shared_message(part: Json) -> common_pb2.SharedPart:
    """The same as a message."""
    return common_pb2.SharedPart(
        shared_bytes=part["bytes"],
        start=part["start"],
        stop=part["stop"],
        layout_digest=bytes.fromhex(part["layout"]),
    )


def disagreement_message(found: Disagreement) -> common_pb2.Disagreement:
    """Where ranks disagree, as a message."""
    return common_pb2.Disagreement(part=found.part, ranks=found.ranks, minority=found.minority)


def rank_message(record: Json) -> registry_pb2.RankRecord:
    """A committed rank's record as a message."""
    return registry_pb2.RankRecord(
        rank=record["rank"],
        session=record["session"],
        owner=ref_message(record["owner"]),
        state_bytes=record["state_bytes"],
        shards=[
            registry_pb2.ShardRecord(
                shard=index,
                offset=shard["offset"],
                bytes=shard["bytes"],
                digest=bytes.fromhex(shard["digest"]),
                holders=[ref_message(holder) for holder in shard["holders"]],
            )
            for index, shard in enumerate(record["shards"])
        ],
        lossy=record.get("lossy", False),
        shared=shared_message(record["shared"]) if "shared" in record else None,
    )


def step_message(job: str, kept: Json, rank: int | None) -> registry_pb2.StepRecord:
    """A committed step as a message, with one rank's record or all; always all if each is a part of one state."""
    everyone = rank is None or is_replicated(kept["ranks"])
    ranks = [record for record in kept["ranks"] if everyone or record["rank"] == rank]
    return registry_pb2.StepRecord(
        job=job,
        step=kept["step"],
        world_size=kept["world_size"],
        copies=kept["copies"],
        ranks=[rank_message(record) for record in ranks],
    )


def transition_message(entry: list[Any]) -> registry_pb2.Transition:
    """A line of the state's `history` as a message."""
    at_ms, epoch, node_id, incarnation, before, after, reason = entry
    transition = registry_pb2.Transition(
        epoch=epoch,
        node=common_pb2.NodeRef(node_id=node_id, incarnation=incarnation),
        to=state_value(after),
        reason=reason,
        at_ms=at_ms,
    )
    # `from` is a word of Python's: it can only be set by its name.
    setattr(transition, "from", state_value(before))
    return transition


def voter_message(voter: Voter) -> node_pb2.VoterRecord:
    """A voter as a message."""
    return node_pb2.VoterRecord(
        node_id=voter.node_id, registry_address=voter.registry_address, raft_address=voter.raft_address
    )


def voter(message: node_pb2.VoterRecord) -> Voter:
    """A voter from a message."""
    return Voter(
        node_id=message.node_id,
        registry_address=message.registry_address,
        raft_address=message.raft_address,
    )


def ref_message(pair: list[object]) -> common_pb2.NodeRef:
    """[node_id, incarnation] as a message."""
    return common_pb2.NodeRef(node_id=str(pair[0]), incarnation=int(str(pair[1])))


def error_code(name: str) -> common_pb2.ErrorCode.ValueType:
    """The wire's code of a refusal."""
    return common_pb2.ErrorCode.Value(f"ERROR_CODE_{name}")
