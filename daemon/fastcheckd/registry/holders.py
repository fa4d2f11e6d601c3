"""Who holds the shards of committed steps, changed after the commit: repairs, nodes that come back, losses. Pure.

A replica that its node no longer has is LOST. The holder's entry says so, and so does a new leader's survey.

Every change names the digest of the shard that it is about, and is refused when that is not what is kept:
a compare-and-set, so that a leader that planned with an older state does no harm. Two promises hold for
every accepted change: a shard has no fewer live copies afterwards, and never two on one node.
"""

from __future__ import annotations

from typing import Any

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX

from .commits import copies_of, find_step
from .records import (
    HOLDERS_MAX,
    LOST,
    SHARDS_MAX,
    Json,
    MalformedError,
    digest_hex,
    integer,
    live,
    name,
    node_ref,
)
from .redundancy import RecordedReplica, Ref, ShardId, find_entry, find_shard, is_lost

#: Changes in one command: some milliseconds of every voter's time.
CHANGES_MAX = 256
#: Replicas in one command that are marked.
MARKED_MAX = 1000


def rehold(state: Json, command: Json) -> Json:
    """Apply changes of holders, each by itself; says of each whether it is done and, if not, why.

    The view shows no holders: its version stays, or every repair would send it to all nodes.

    Raises:
        MalformedError: nothing has changed.
    """
    given = command.get("changes")
    if not isinstance(given, list) or len(given) > CHANGES_MAX:
        raise MalformedError(f"changes must be a list of at most {CHANGES_MAX}")
    changes = [_change(value) for value in given]
    why = [_apply(state, change) for change in changes]
    touched = {(change["job"], change["step"]) for change, no in zip(changes, why, strict=True) if not no}
    for job_name, step in sorted(touched):
        kept = find_step(state["jobs"][job_name], step)
        assert kept is not None, "it was found to be changed"
        kept["copies"] = copies_of(kept["ranks"])
    state["holders_version"] += bool(touched)
    return {"ok": True, "done": [not no for no in why], "why": why}


def mark(state: Json, command: Json) -> Json:
    """Nodes no longer have the replicas that are `lost`, and do have those that are `held`.

    What no record names is left out: its step may have gone meanwhile. A replica that is in both lists is lost.

    Raises:
        MalformedError: nothing has changed.
    """
    lost, held = _replicas(command, "lost"), _replicas(command, "held")
    marks = dict.fromkeys(held, False) | dict.fromkeys(lost, True)
    for replica, wanted in marks.items():
        if is_lost(state, replica) is (not wanted):
            _set_lost(state, replica, wanted)
            state["holders_version"] += 1
    return {"ok": True}


def _set_lost(state: Json, replica: RecordedReplica, lost: bool) -> None:
    found = find_shard(state, replica.shard)
    assert found is not None, "it was found to be named"
    entry = find_entry(*found, replica.ref)
    if isinstance(entry, dict):
        entry.pop("owner_state", None)
        entry |= {"owner_state": LOST} if lost else {}
    else:
        assert entry is not None, "it was found to be named"
        entry[2:] = [LOST] if lost else []


def _replicas(command: Json, key: str) -> list[RecordedReplica]:
    given = command.get(key)
    if not isinstance(given, list) or len(given) > MARKED_MAX:
        raise MalformedError(f"{key} must be a list of at most {MARKED_MAX} replicas")
    return [_replica(value) for value in given]


def _replica(value: Any) -> RecordedReplica:
    if not isinstance(value, list) or len(value) != 6:
        raise MalformedError("a replica is a list of job, step, rank, shard, node and incarnation")
    fields = dict(zip(("job", "step", "rank", "shard"), value[:4], strict=True))
    shard_id = ShardId(
        name(fields, "job"),
        integer(fields, "step", 0, STEP_MAX),
        integer(fields, "rank", 0, RANK_MAX - 1),
        integer(fields, "shard", 0, SHARDS_MAX - 1),
    )
    return RecordedReplica(shard_id, Ref(*node_ref(value[4:], "the node of a replica")))


def _change(value: Any) -> Json:
    if not isinstance(value, dict) or value.get("kind") not in ("copy", "owner"):
        raise MalformedError("a change of holders must be of kind copy or owner")
    add, remove = value.get("add"), value.get("remove")
    change: Json = {
        "job": name(value, "job"),
        "step": integer(value, "step", 0, STEP_MAX),
        "rank": integer(value, "rank", 0, RANK_MAX - 1),
        "shard": integer(value, "shard", 0, SHARDS_MAX - 1),
        "digest": digest_hex(value),
        "kind": value["kind"],
        "add": None if add is None else node_ref(add, "the node to add"),
        "remove": None if remove is None else node_ref(remove, "the node to remove"),
        "absent": _absent(value),
    }
    if change["add"] is None and change["remove"] is None:
        raise MalformedError("a change of holders must add or remove one")
    if change["kind"] == "owner" and (change["add"] is None or change["remove"] is not None):
        raise MalformedError("an owner is replaced by its own node in a later life, nothing else")
    if change["absent"] and change["kind"] != "owner":
        raise MalformedError("only an owner may lack some of its shards")
    if add is not None and remove is not None and change["add"][0] == change["remove"][0]:
        raise MalformedError("a node that comes back is added; its earlier life goes by itself")
    return change


def _absent(value: Json) -> list[int]:
    absent = value.get("absent", [])
    if not isinstance(absent, list) or len(absent) > SHARDS_MAX:
        raise MalformedError("absent must be a list of shards")
    return [integer({"absent": shard}, "absent", 0, SHARDS_MAX - 1) for shard in absent]


def _apply(state: Json, change: Json) -> str:
    """Make one (well-formed) change, or say why not."""
    job = state["jobs"].get(change["job"])
    kept = None if job is None else find_step(job, change["step"])
    if kept is None:
        return f"step {change['step']} of job {change['job']} is not kept"
    record = next((r for r in kept["ranks"] if r["rank"] == change["rank"]), None)
    if record is None or change["shard"] >= len(record["shards"]):
        return f"step {change['step']} of job {change['job']} has no such rank or shard"
    shard = record["shards"][change["shard"]]
    if shard["digest"] != change["digest"]:
        return f"what is committed has the digest {shard['digest']}, not {change['digest']}"
    if change["kind"] == "owner":
        return _return_owner(state, record, change)
    return _move_copy(state, record, shard, change["add"], change["remove"])


def _return_owner(state: Json, record: Json, change: Json) -> str:
    add = change["add"]
    if add[0] != record["owner"][0]:
        return f"node {add[0]} does not own it, {record['owner'][0]} does"
    if not live(state, add):
        return _over(add)
    if record["owner"] != add:
        for shard in record["shards"]:
            shard.pop("owner_state", None)
    record["owner"] = add
    # In the same command: at no time does the record name what is not there.
    for index in change["absent"]:
        if index < len(record["shards"]):
            record["shards"][index]["owner_state"] = LOST
    return ""


def _move_copy(
    state: Json, record: Json, shard: Json, add: list[Any] | None, remove: list[Any] | None
) -> str:
    before: list[list[Any]] = shard["holders"]
    after = list(before)
    named = [holder[:2] for holder in before]
    if add is not None and not live(state, add):
        return _over(add)
    if add is not None and add not in named:
        if no := _may_add(state, record["owner"], before, add):
            return no
        if remove is not None and remove not in named:
            return f"node {remove[0]} in incarnation {remove[1]} does not hold it any more"
        earlier = next((at for at, holder in enumerate(before) if holder[0] == add[0]), None)
        if earlier is None:
            after.append(add)
        else:
            after[earlier] = add
    if remove is not None:
        after = [holder for holder in after if holder[:2] != remove]
    if len(after) > HOLDERS_MAX:
        return f"it has {HOLDERS_MAX} holders already"
    own = [*record["owner"], *(["owner_state"] if "owner_state" in shard else [])]
    if remove is not None and _live_count(state, own, after) < max(1, _live_count(state, own, before)):
        # Nor is one forgotten of those that may come back with the last copy.
        return f"without node {remove[0]} it would have fewer live copies, or none that comes back"
    shard["holders"] = after
    return ""


def _may_add(state: Json, owner: list[Any], holders: list[list[Any]], add: list[Any]) -> str:
    if add[0] == owner[0]:
        return f"node {add[0]} is its owner, whose copy counts already"
    returns = any(holder[0] == add[0] for holder in holders)
    if not returns and state["nodes"][add[0]]["state"] != "UP":
        return f"node {add[0]} is DRAINING: it gets nothing new"
    return ""


def _over(ref: list[Any]) -> str:
    return f"node {ref[0]} in incarnation {ref[1]} is over"


def _live_count(state: Json, owner: list[Any], holders: list[list[Any]]) -> int:
    return sum(live(state, ref[:2]) and len(ref) == 2 for ref in [owner, *holders])
