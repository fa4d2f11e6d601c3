"""The part of the registry's gRPC face that is about keeping what is committed: redundancy, returns, safe stops.

The leader's alone. It checks and translates; `registry.redundancy`, `repairs` and the state machine decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..digests import DIGEST_BYTES
from ..errors import FencedError, InvalidRequestError
from ..registry.commands import CHANGES_MAX, rehold
from ..registry.model import Ref, ShardId, State, is_live
from ..registry.redundancy import RecordedReplica, find_shard, replicas_of, stop_verdict
from ..registry.repairs import Repairs
from .leader_calls import LeaderCalls, decides

Context = grpc.aio.ServicerContext[Any, Any]

ENTRIES_MAX = 1000


@dataclass
class SortedInventory:
    """What becomes of the entries of one report."""

    #: Entries that counted already.
    known: int = 0
    changes: list[log_pb2.HolderChange] = field(default_factory=list)
    held: list[RecordedReplica] = field(default_factory=list)
    lost: list[RecordedReplica] = field(default_factory=list)


def sort_inventory(
    state: State, node: Ref, entries: Iterable[rpb.InventoryEntry], short: frozenset[ShardId]
) -> SortedInventory:
    """Compare what a node says with what is recorded. Pure.

    An owner's life is recorded once for all shards of the rank. So it counts again when all of them are here, and
    also when only some are and one of those is `short`: it may be the last copy. What is missing
    is LOST from the same change on. Copies count again where the record names the node, and where the shard
    is short of copies.
    """
    found = SortedInventory()
    own: dict[tuple[str, int, int], tuple[int, dict[int, bytes]]] = {}
    for entry in entries:
        shard_id = ShardId.of(entry.key)
        recorded = find_shard(state, shard_id)
        if recorded is None:
            continue
        record, shard = recorded
        replica = RecordedReplica(shard_id, node)
        named = node in replicas_of(record, shard)
        if entry.kind == pb.REPLICA_KIND_UNSPECIFIED:
            if named:
                found.lost.append(replica)
            continue
        if shard.digest != entry.digest:
            continue
        if named:
            found.known += 1
            found.held.append(replica)
        elif record.owner.node_id == node.node_id:
            if entry.kind == pb.REPLICA_KIND_OWNER:
                _, here = own.setdefault(shard_id[:3], (len(record.shards), {}))
                here[shard_id.shard] = shard.digest
        elif shard_id in short or any(holder.node_id == node.node_id for holder in shard.holders):
            found.changes.append(_change(shard_id, shard.digest, node))
    for rank, (count, here) in own.items():
        ids = [ShardId(*rank, shard) for shard in range(count)]
        if len(here) == count or any(ids[shard] in short for shard in here):
            first = min(here)
            absent = [shard for shard in range(count) if shard not in here]
            change = _change(ids[first], here[first], node)
            change.of_owner = True
            change.absent.extend(absent)
            found.changes.append(change)
    return found


def _change(shard_id: ShardId, digest: bytes, node: Ref) -> log_pb2.HolderChange:
    return log_pb2.HolderChange(key=shard_id.message(), digest=digest, add=node.message())


class RegistryMaintenance(LeaderCalls):
    """A part of `services.registry.RegistryService`."""

    @property
    def _repairs(self) -> Repairs:
        return self._leader.repairs

    @decides
    async def SafeToStop(self, request: rpb.SafeToStopRequest, context: Context) -> rpb.SafeToStopResponse:
        """What stopping a node for good would cost, current as of this call."""
        await self._leader.confirm()
        unwell = frozenset(node_id for node_id, _ in self._leader.arbiter.suspects)
        voters = [voter.node_id for voter in self._raft.voters]

        def judge(state: State) -> rpb.SafeToStopResponse:
            if request.node_id not in state.nodes:
                raise InvalidRequestError(
                    f"there is no node {request.node_id[:128]!r}: see 'fastcheck nodes'"
                )
            verdict = stop_verdict(
                state,
                request.node_id,
                tolerate=self._config.tolerate,
                voters=voters,
                unwell=unwell,
            )
            return rpb.SafeToStopResponse(
                safe=verdict.safe,
                survivable=verdict.survivable,
                reasons=verdict.reasons,
                short_shards=verdict.short_shards,
                lost_shards=verdict.lost_shards,
                jobs=verdict.jobs,
            )

        return self._raft.read(judge)

    @decides
    async def GetRedundancy(
        self, request: rpb.GetRedundancyRequest, context: Context
    ) -> rpb.GetRedundancyResponse:
        """How redundant the committed steps are, and what is being done about it."""
        return self._repairs.redundancy()

    @decides
    async def ReportInventory(
        self, request: rpb.ReportInventoryRequest, context: Context
    ) -> rpb.ReportInventoryResponse:
        """A node says what it holds, or what it holds no more. Without entries: it has said all."""
        if len(request.entries) > ENTRIES_MAX:
            raise InvalidRequestError(f"an inventory has at most {ENTRIES_MAX} entries: send it in parts")
        if any(len(entry.digest) != DIGEST_BYTES for entry in request.entries):
            raise InvalidRequestError(f"a digest has {DIGEST_BYTES} bytes")
        node = Ref.of(request.node)
        short = frozenset(shortage.id for shortage in self._repairs.survey().shortages if shortage.missing)

        def sort(state: State) -> SortedInventory:
            known = state.nodes.get(node.node_id)
            if known is None or known.incarnation != node.incarnation or not is_live(known):
                raise FencedError(f"node {node.node_id} is not in incarnation {node.incarnation} any more")
            return sort_inventory(state, node, request.entries, short)

        found = self._raft.read(sort)
        await self._repairs.mark_held(found.held)
        await self._repairs.mark_lost(found.lost)
        adopted = found.known
        for first in range(0, len(found.changes), CHANGES_MAX):
            result = await self._propose(rehold(found.changes[first : first + CHANGES_MAX]))
            adopted += sum(not why for why in result.why)
            self._repairs.changed()
        self._repairs.returned(node, finished=not request.entries)
        return rpb.ReportInventoryResponse(adopted=adopted)
