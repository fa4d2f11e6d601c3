"""Who holds the shards of committed steps, changed after the commit: repairs, nodes that come back, losses. Pure.

A replica that its node no longer has is LOST. The shard's record says so, and so does a new leader's survey.

Every change names the digest of the shard that it is about, and is refused when that is not what is kept:
a compare-and-set, so that a leader that planned with an older state does no harm. Two promises hold for
every accepted change: a shard has no fewer live copies afterwards, and never two on one node.
"""

from __future__ import annotations

from collections.abc import Collection

from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from .commands import HOLDERS_MAX
from .commits import copies_of
from .model import UP, AnyRef, Ref, ShardId, State, done, live
from .redundancy import RecordedReplica, find_shard, is_lost


def rehold(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """Apply changes of holders, each by itself; says of each why it is not done.

    The view shows no holders: its version stays, or every repair would send it to all nodes.
    """
    changes = command.rehold.changes
    why = [_apply(state, change) for change in changes]
    touched = {(c.key.job, c.key.step) for c, no in zip(changes, why, strict=True) if not no}
    for job_name, step in touched:
        kept = state.jobs[job_name].find_step(step)
        assert kept is not None, "it was found to be changed"
        kept.copies = copies_of(kept.ranks)
    state.holders_version += bool(touched)
    return log_pb2.RegistryResult(ok=True, why=why)


def mark(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """Nodes no longer have the replicas that are `lost`, and do have those that are `held`.

    What no record names is left out: its step may have gone meanwhile. A replica that is in both lists is lost.
    """
    marks = dict.fromkeys(map(RecordedReplica.of, command.mark.held), False)
    marks |= dict.fromkeys(map(RecordedReplica.of, command.mark.lost), True)
    for replica, lost in marks.items():
        if is_lost(state, replica) is (not lost):
            found = find_shard(state, replica.shard)
            assert found is not None, "a record names it"
            others = [ref for ref in found[1].lost if Ref.of(ref) != replica.ref]
            _set_lost(found[1], [*others, replica.ref] if lost else others)
            state.holders_version += 1
    return done()


def _set_lost(shard: rpb.ShardRecord, lost: Collection[AnyRef]) -> None:
    refs = [Ref.of(ref).message() for ref in lost]
    shard.ClearField("lost")
    shard.lost.extend(refs)


def _apply(state: State, change: log_pb2.HolderChange) -> str:
    """Make one (well-formed) change, or say why not."""
    key = change.key
    if key.job not in state.jobs or state.jobs[key.job].find_step(key.step) is None:
        return f"step {key.step} of job {key.job} is not kept"
    if (found := find_shard(state, ShardId.of(key))) is None:
        return f"step {key.step} of job {key.job} has no such rank or shard"
    record, shard = found
    if shard.digest != change.digest:
        return f"what is committed has the digest {shard.digest.hex()}, not {change.digest.hex()}"
    if change.of_owner:
        return _return_owner(state, record, change)
    add = Ref.of(change.add) if change.HasField("add") else None
    remove = Ref.of(change.remove) if change.HasField("remove") else None
    return _move_copy(state, Ref.of(record.owner), shard, add, remove)


def _return_owner(state: State, record: rpb.RankRecord, change: log_pb2.HolderChange) -> str:
    before, add = Ref.of(record.owner), Ref.of(change.add)
    if add.node_id != before.node_id:
        return f"node {add.node_id} does not own it, {before.node_id} does"
    if not live(state, add):
        return _over(add)
    record.owner.CopyFrom(change.add)
    for index, shard in enumerate(record.shards):
        # In the same command: at no time does the record name what is not there.
        lost = [ref for ref in map(Ref.of, shard.lost) if ref != before or add == before]
        if index in change.absent and add not in lost:
            lost.append(add)
        if lost or shard.lost:
            _set_lost(shard, lost)
    return ""


def _move_copy(state: State, owner: Ref, shard: rpb.ShardRecord, add: Ref | None, remove: Ref | None) -> str:
    before = list(map(Ref.of, shard.holders))
    after = list(before)
    lost = set(map(Ref.of, shard.lost))
    if add is not None and not live(state, add):
        return _over(add)
    if add is not None and add not in before:
        if no := _may_add(state, owner, before, add):
            return no
        if remove is not None and remove not in before:
            return f"node {remove.node_id} in incarnation {remove.incarnation} does not hold it any more"
        earlier = next((at for at, holder in enumerate(before) if holder.node_id == add.node_id), None)
        if earlier is None:
            after.append(add)
        else:
            after[earlier] = add
    if remove is not None and remove in after:
        after.remove(remove)
    if len(after) > HOLDERS_MAX:
        return f"it has {HOLDERS_MAX} holders already"

    def live_count(holders: list[Ref]) -> int:
        return sum(live(state, ref) and ref not in lost for ref in [owner, *holders])

    if remove is not None and live_count(after) < max(1, live_count(before)):
        # Nor is one forgotten of those that may come back with the last copy.
        return f"without node {remove.node_id} it would have fewer live copies, or none that comes back"
    shard.ClearField("holders")
    shard.holders.extend(ref.message() for ref in after)
    if lost:
        _set_lost(shard, [ref for ref in map(Ref.of, shard.lost) if ref in (owner, *after)])
    return ""


def _may_add(state: State, owner: Ref, holders: list[Ref], add: Ref) -> str:
    if add.node_id == owner.node_id:
        return f"node {add.node_id} is its owner, whose copy counts already"
    returns = any(holder.node_id == add.node_id for holder in holders)
    if not returns and state.nodes[add.node_id].state != UP:
        return f"node {add.node_id} is DRAINING: it gets nothing new"
    return ""


def _over(ref: Ref) -> str:
    return f"node {ref.node_id} in incarnation {ref.incarnation} is over"
