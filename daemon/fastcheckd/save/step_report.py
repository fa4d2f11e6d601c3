"""A rank's report of a step whose copies are made, repeated until the registry commits the step or refuses it."""

from __future__ import annotations

import time

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..config import Config
from ..counters import Counters
from ..errors import (
    HolderLostError,
    NoQuorumError,
    PeerError,
    ReplicasDisagreeError,
    SupersededError,
    from_code,
)
from ..identity import NodeLife
from ..registry.client import RegistryClient
from .placement_client import REGISTRY_TIMEOUT_S, PlacementClient
from .save import Save
from .shards import Shard

#: How long the leader keeps a report waiting before it says for whom.
REPORT_WAIT_S = 1.0


class StepReporter:
    """Reports for one data process."""

    def __init__(
        self,
        config: Config,
        identity: NodeLife,
        registry: RegistryClient,
        counters: Counters,
        placing: PlacementClient,
    ) -> None:
        self._config = config
        self._identity = identity
        self._registry = registry
        self._counters = counters
        self._placing = placing

    async def report(self, save: Save, shards: list[Shard], epoch: int) -> None:
        """Report until the registry commits; raises what it refuses with."""
        silent_since: float | None = None
        give_up_at = time.monotonic() + self._config.rank_wait_timeout_s
        while True:
            record = rpb.RankRecord(
                rank=save.key.rank,
                session=save.session,
                owner=self._identity.ref(),
                state_bytes=save.state_bytes,
                shards=[
                    rpb.ShardRecord(
                        shard=s.index,
                        offset=s.manifest.offset,
                        bytes=s.bytes,
                        digest=s.manifest.digest,
                        # In one order, whoever acknowledged first: the same holders are the same record.
                        holders=[s.acknowledged[node_id].node for node_id in sorted(s.acknowledged)],
                    )
                    for s in shards
                ],
                lossy=save.lossy,
                shared=save.shared,
                begun_after=save.begun_after or None,
            )
            request = rpb.ReportRequest(
                job=save.key.job,
                step=save.key.step,
                world_size=save.world_size,
                epoch=epoch,
                record=record,
                wait_s=REPORT_WAIT_S,
                shared_digests=save.shared_digests,
            )
            save.reported = True
            try:
                response = await self._registry.report(request, timeout_s=REPORT_WAIT_S + REGISTRY_TIMEOUT_S)
            except (NoQuorumError, PeerError) as error:
                now = time.monotonic()
                silent_since = now if silent_since is None else silent_since
                if isinstance(error, NoQuorumError):
                    self._placing.silence.noted()
                    if now - silent_since > self._config.provisional_after_s:
                        # Replicated, and nobody there to commit it: it waits like those that were placed without.
                        save.reach(tpb.SAVE_STATE_PROVISIONAL)
                await self._placing.wait_out(save, error)
                # The silence is not the other ranks' fault.
                give_up_at = time.monotonic() + self._config.rank_wait_timeout_s
                continue
            self._placing.silence.heard()
            silent_since = None
            if response.state == rpb.REPORT_STATE_COMMITTED:
                return
            if response.state == rpb.REPORT_STATE_WAITING:
                if response.absent_ranks:
                    ranks = ", ".join(map(str, response.absent_ranks))
                    save.stalled(
                        SupersededError(f"{save.key} is replicated, but rank {ranks} has not saved this step")
                    )
                else:
                    save.moved()
                if time.monotonic() > give_up_at:
                    raise SupersededError(
                        f"{save.key} is replicated, but other ranks did not save this step within "
                        f"{self._config.rank_wait_timeout_s:g} s; it may still be committed if they do"
                    )
                continue
            if response.error.code == pb.ERROR_CODE_HOLDER_LOST:
                lost = tuple(n.node_id for n in response.lost_holders)
                raise HolderLostError(response.error.message, lost)
            over = response.error.code == pb.ERROR_CODE_INCARNATION_OVER
            if over and await self._identity.outlives(record.owner):
                continue
            if response.error.code == pb.ERROR_CODE_REPLICAS_DISAGREE:
                self._counters.add("replicas_disagreed")
                raise ReplicasDisagreeError(response.error.message, response.disagreements)
            raise from_code(response.error.code, response.error.message)
