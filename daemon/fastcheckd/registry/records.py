"""The JSON forms inside commands and state, checked field by field. Pure.

Commands come from a leader that checked them already, but a voter must stay standing whatever the
log holds: everything is parsed anew, by these functions, before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX, check_name

from ..config import LABELS_MAX
from ..digests import DIGEST_BYTES

Json = dict[str, Any]

ADDRESS_BYTES_MAX = 300
#: Random identifiers that others make: client ids, life ids.
TOKEN_BYTES_MAX = 128
SHARDS_MAX = 64
#: Of a state that all ranks hold alike.
LAYOUT_DIGEST_BYTES = 16
HOLDERS_MAX = 16
#: The state of a replica whose node no longer has the bytes: the third item of a holder's entry, or the `owner_state`
#: of the shard. Every other replica is held.
LOST = "LOST"
#: Why a node is in its state, in words for people.
REASON_BYTES_MAX = 200
#: Config allows 5; while one is being replaced there may be one more or one fewer.
VOTERS_MAX = 9


class MalformedError(ValueError):
    """A command or record that nobody following the rules would send."""


def integer(source: Json, key: str, low: int, high: int) -> int:
    """A whole number within [low, high]."""
    value = source.get(key)
    if type(value) is not int or not low <= value <= high:
        raise MalformedError(f"{key} must be a whole number from {low} to {high}")
    return value


def flag(source: Json, key: str, *, default: bool) -> bool:
    """True or false; `default` where it is missing."""
    value = source.get(key, default)
    if not isinstance(value, bool):
        raise MalformedError(f"{key} must be true or false")
    return value


def name(source: Json, key: str) -> str:
    """A job or node name."""
    try:
        return check_name(key, source.get(key, ""))
    except ValueError as error:
        raise MalformedError(str(error)) from None


def text(source: Json, key: str, bytes_max: int, *, empty: bool = False) -> str:
    """Printable ASCII of bounded length."""
    value = source.get(key)
    if not isinstance(value, str) or not value.isascii() or not (value.isprintable() or not value):
        raise MalformedError(f"{key} must be printable ASCII text")
    if len(value) > bytes_max or not (value or empty):
        raise MalformedError(f"{key} must have 1 to {bytes_max} characters")
    return value


def node_ref(value: Any, what: str) -> list[Any]:
    """[node_id, incarnation]."""
    if not isinstance(value, list) or len(value) != 2:
        raise MalformedError(f"{what} must be a pair of node id and incarnation")
    pair = {"node_id": value[0], "incarnation": value[1]}
    return [name(pair, "node_id"), integer(pair, "incarnation", 0, STEP_MAX)]


def at_ms(command: Json) -> int | None:
    """Wall clock of the leader that proposed a command, to be shown only; None: it did not say."""
    return integer(command, "at_ms", 0, STEP_MAX) if "at_ms" in command else None


def live(state: Json, ref: list[Any]) -> bool:
    """Whether a node is there in this very life: its copies count. DRAINING ones do, until they are elsewhere."""
    node = state["nodes"].get(ref[0])
    return node is not None and node["incarnation"] == ref[1] and node["state"] in ("UP", "DRAINING")


def digest_hex(source: Json) -> str:
    """A shard's digest in hex."""
    digest = text(source, "digest", 2 * DIGEST_BYTES)
    if len(digest) != 2 * DIGEST_BYTES or not _is_hex(digest):
        raise MalformedError(f"a shard's digest must be {DIGEST_BYTES} bytes in hex")
    return digest


def _is_hex(digits: str) -> bool:
    # One call: every voter asks this of every shard of a step.
    return not digits.strip("0123456789abcdef")


def shard_record(value: Any) -> Json:
    """{"offset", "bytes", "digest" (hex), "holders" ([[node_id, incarnation], ...])}."""
    if not isinstance(value, dict) or not isinstance(value.get("holders"), list):
        raise MalformedError("a shard must have an offset, bytes, a digest and holders")
    if len(value["holders"]) > HOLDERS_MAX:
        raise MalformedError(f"a shard must have at most {HOLDERS_MAX} holders")
    return {
        "offset": integer(value, "offset", 0, STEP_MAX),
        "bytes": integer(value, "bytes", 0, STEP_MAX),
        "digest": digest_hex(value),
        "holders": [node_ref(holder, "a holder") for holder in value["holders"]],
    }


def rank_record(value: Any) -> Json:
    """{"rank", "session", "owner", "state_bytes", "shards"}; the shards tile [0, state_bytes).

    And {"lossy": true} if it is; an exact record has no such key, so that it is the same record as that
    of a version that knew no lossy coding. Likewise {"shared": ...} (`shared_part`) if the state is a part of one
    that all ranks hold.
    """
    if not isinstance(value, dict) or not isinstance(value.get("shards"), list):
        raise MalformedError("a rank's record must have shards")
    if not 1 <= len(value["shards"]) <= SHARDS_MAX:
        raise MalformedError(f"a rank's record must have 1 to {SHARDS_MAX} shards")
    record: Json = {
        "rank": integer(value, "rank", 0, RANK_MAX - 1),
        "session": integer(value, "session", 0, STEP_MAX),
        "owner": node_ref(value.get("owner"), "the owner"),
        "state_bytes": integer(value, "state_bytes", 0, STEP_MAX),
        "shards": [shard_record(shard) for shard in value["shards"]],
    }
    if flag(value, "lossy", default=False):
        record["lossy"] = True
    if value.get("shared") is not None:
        record["shared"] = shared_part(value["shared"], record["state_bytes"])
    at = 0
    for shard in record["shards"]:
        if shard["offset"] != at or (shard["bytes"] == 0 and record["state_bytes"] > 0):
            raise MalformedError(f"the shards of rank {record['rank']} do not tile its state")
        at += shard["bytes"]
    if at != record["state_bytes"]:
        raise MalformedError(f"the shards of rank {record['rank']} do not tile its state")
    return record


def shared_part(value: Any, state_bytes: int) -> Json:
    """{"bytes", "start", "stop", "layout" (hex)}: a rank's part of a shared state of so many bytes."""
    if not isinstance(value, dict):
        raise MalformedError("a shared part must say where it lies in which state")
    layout = text(value, "layout", 2 * LAYOUT_DIGEST_BYTES)
    if len(layout) != 2 * LAYOUT_DIGEST_BYTES or not _is_hex(layout):
        raise MalformedError(f"a layout's digest must be {LAYOUT_DIGEST_BYTES} bytes in hex")
    part: Json = {
        "bytes": integer(value, "bytes", 0, STEP_MAX),
        "start": integer(value, "start", 0, STEP_MAX),
        "stop": integer(value, "stop", 0, STEP_MAX),
        "layout": layout,
    }
    if not part["start"] <= part["stop"] <= part["bytes"] or part["stop"] - part["start"] > state_bytes:
        raise MalformedError("a shared part must lie in its state, and its bytes in the rank's")
    return part


def node_fields(value: Any) -> Json:
    """What a node says about itself when it registers."""
    if not isinstance(value, dict) or not isinstance(value.get("voter"), bool):
        raise MalformedError("a node must say its name, its addresses and whether it is a voter")
    return {
        "node_id": name(value, "node_id"),
        "agent_address": text(value, "agent_address", ADDRESS_BYTES_MAX),
        "data_address": text(value, "data_address", ADDRESS_BYTES_MAX),
        "lane_address": text(value, "lane_address", ADDRESS_BYTES_MAX),
        "voter": value["voter"],
        "ram_budget_bytes": integer(value, "ram_budget_bytes", 0, STEP_MAX),
        "labels": _labels(value.get("labels", {})),
    }


def _labels(value: Any) -> dict[str, str]:
    """Labels by name, in order of their names."""
    if not isinstance(value, dict) or len(value) > LABELS_MAX:
        raise MalformedError(f"labels must be pairs of a name and a value, at most {LABELS_MAX}")
    return {name({"label": key}, "label"): name(value, key) for key in sorted(value, key=str)}


def voter_record(value: Any) -> list[str]:
    """[node_id, registry_address, raft_address]."""
    if not isinstance(value, list) or len(value) != 3:
        raise MalformedError("a voter must be a node id, a registry address and a raft address")
    parts = dict(zip(("node_id", "registry_address", "raft_address"), value, strict=True))
    return [
        name(parts, "node_id"),
        text(parts, "registry_address", ADDRESS_BYTES_MAX),
        text(parts, "raft_address", ADDRESS_BYTES_MAX),
    ]


def is_lossy(ranks: Iterable[Json]) -> bool:
    """Whether the record of at least one rank says that its state is the outcome of a lossy coding."""
    return any(rank.get("lossy", False) for rank in ranks)
