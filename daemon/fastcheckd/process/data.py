"""The data process: owner of the bytes. The only place that knows all parts that move them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from fastcheck_proto.conventions import REQUEST_BYTES_MAX
from fastcheck_proto.v1 import (
    common_pb2,
    node_pb2_grpc,
    observe_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    registry_pb2,
    trainer_pb2_grpc,
)

from ..config import Config
from ..counters import Counters
from ..dialer import Dialer
from ..durations import DATA, Durations
from ..errors import (
    ConfigError,
    StoreError,
)
from ..health.lease import LeaseHolder
from ..identity import NodeLife
from ..interfaces import faster_than, interface_of, interfaces
from ..maintenance.maintenance import Maintenance
from ..observe import data_metrics
from ..observe.scrape import ObserveService
from ..registry.client import RegistryClient
from ..registry.known_voters import remember, with_remembered_voters
from ..registry.raft.membership import voter_of
from ..restore.coordinator import RestoreCoordinator
from ..rpc import server_options
from ..save.coordinator import SaveCoordinator
from ..save.replicator import Replicator
from ..services.admission import Admission, Owners
from ..services.data_control import DataControlService
from ..services.peer import PeerService
from ..services.trainer import TrainerService
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..transfer.client import PeerClient
from ..transfer.codec_pool import CodecPool
from ..transfer.encoder_cache import EncoderCache
from ..transfer.fetch import Fetcher
from ..transfer.lane_meter import LaneMeter
from ..transfer.lane_tls import LaneTls
from ..transfer.pacing import TRICKLE_SHARE, Gate, Pacer
from ..transfer.policy import ReplicationPolicy, RestorePolicy
from ..transfer.receiver import Receiver
from ..transfer.replication_pacing import ReplicationPacing
from ..transfer.server import TransferServer
from ..transfer.tickets import TicketOffice
from ..view import LastView, ViewFollower
from .runtime import listen_tcp, listening, stop_signal, watching_crowds

if TYPE_CHECKING:
    from ..tokens import Tokens

logger = logging.getLogger(__name__)

#: How long a data process that was just started tries to get its RAM directory.
STORE_PATIENCE_S = 2.0
#: A repair that has to wait for this node's saves and copies moves a chunk this often: they may never end, and a job
#: that saves no more would stay without its copies. For a load it waits longer, at its source.
REPAIR_TRICKLE_S = 1.0
REPAIR_BURST_S = 0.1


class _DataProcess:
    """The parts of a data process, wired."""

    def __init__(self, config: Config, store: ReplicaStore, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._durations = durations = Durations(DATA)
        self.dialer = dialer = Dialer.of(config)
        self.identity = identity = NodeLife(config.node_id)
        self.lease = LeaseHolder(config.node_id, lambda: identity.incarnation)
        self.store = store
        self.hashing = ThreadPoolExecutor(config.worker_threads, thread_name_prefix="hash")
        # Lane threads mostly wait for the network: room for the steps of eight ranks at full spread, or for their
        # loads, each of which takes a thread per shard and source.
        self.lanes = ThreadPoolExecutor(8 * config.spread * config.lane_streams, thread_name_prefix="lane")
        self.codec = CodecPool(config.codec_threads, config.codec_nice)
        self.registry = registry = RegistryClient(with_remembered_voters(config), counters, dialer=dialer)
        self.view = view = ViewFollower(registry, identity, LastView(config))
        present = interfaces()
        self._interface = interface_of(config.effective_lane_host, present)
        self._faster_interface = faster_than(self._interface, present)
        self._log_lane()
        meter = LaneMeter()
        self.pacing = ReplicationPacing(
            cap_bytes_per_s=config.replicate_bytes_per_s,
            interface=self._shared_interface(),
            restoring=lambda: restore.bringing or self.server.serving,
            meter=meter, counters=counters, chunk_bytes=config.chunk_bytes,
            transfer_timeout_s=config.transfer_timeout_s,
        )  # fmt: skip
        tls = LaneTls(config) if config.lane_tls else None
        self.client = client = PeerClient(config.transfer_timeout_s, dialer)
        fetcher = Fetcher(config, client, counters, self.lanes, self.codec, meter=meter, tls=tls)
        tickets = TicketOffice()
        self.server = TransferServer(
            config.effective_lane_host, config.lane_port, tickets, counters, config.transfer_timeout_s,
            gates={peer_pb2.PURPOSE_REPLICATE: self.pacing, peer_pb2.PURPOSE_REPAIR: self._gate(
                lambda: restore.bringing or self.server.serving, "repairs_for_restore"
            )},
            congestion=config.lane_congestion, meter=meter, tls=tls,
        )  # fmt: skip
        encoders = EncoderCache(
            store, self.codec, RestorePolicy(config.codec, config.codec_threads), counters
        )
        replicator = Replicator(
            config=config, identity=identity, store=store, registry=registry, client=client, view=view,
            counters=counters, codec=self.codec, encoders=encoders,
            policy=ReplicationPolicy(config.codec, config.codec_threads), pacing=self.pacing,
        )  # fmt: skip
        self.saving = SaveCoordinator(
            config=config, identity=identity, store=store, registry=registry, view=view,
            counters=counters, durations=durations, replicator=replicator,
        )  # fmt: skip
        restore = RestoreCoordinator(
            config=config, store=store, registry=registry, client=client, fetcher=fetcher, view=view,
            counters=counters, durations=durations, executor=self.hashing, on_brought=self._brought,
        )  # fmt: skip
        self.receiver = Receiver(
            config, identity, self.lease, store, fetcher, counters,
            kept_steps=lambda job: view.kept_steps().get(job, ()), is_short=self.saving.supply.is_short,
            gate=self._repair_gate(
                lambda: (
                    self.saving.replicating or self.receiver.arriving > 0 or restore.bringing or self.server.serving
                )
            ),
            incoming=self._gate(lambda: restore.bringing, "copies_for_restore"),
        )  # fmt: skip
        self.maintenance = Maintenance(
            config=config, identity=identity, store=store, registry=registry, view=view,
            counters=counters, executor=self.hashing,
            busy=lambda: (
                self.saving.replicating or self.receiver.arriving > 0 or restore.bringing or self.server.serving
            ),
            on_pruned=self.saving.supply.tidied,
        )  # fmt: skip
        self.peer_service = PeerService(
            cluster_id=config.cluster_id, receiver=self.receiver, store=store, encoders=encoders, tickets=tickets,
            counters=counters, maintenance=self.maintenance, lane_report=self._lane_report,
            certificates=dialer.certificates, saves=self.saving.reports,
        )  # fmt: skip
        owners = Owners(view, registry, enforced=config.tls_cert_file is not None)
        self.trainer_service = TrainerService(self.saving, restore, registry, owners)
        self._resumed = False
        view.on_change(self._on_view)

    def _gate(self, busy: Callable[[], bool], counter: str) -> Gate:
        """Holds transfers up while `busy`, but for a trickle; counts the chunks that waited."""
        pacer = Pacer(
            math.inf,
            burst_bytes=self._config.chunk_bytes,
            trickle_s=TRICKLE_SHARE * self._config.transfer_timeout_s,
        )
        return Gate(pacer, busy, paused=lambda: self._counters.add(counter))

    def _repair_gate(self, busy: Callable[[], bool]) -> Gate:
        """For copies that are made in place of lost ones: they give way to everything, and have a rate of their own."""
        config = self._config
        pacer = Pacer(
            config.repair_bytes_per_s,
            burst_bytes=max(config.chunk_bytes, int(config.repair_bytes_per_s * REPAIR_BURST_S)),
            trickle_s=min(REPAIR_TRICKLE_S, config.transfer_timeout_s / 4),
        )
        return Gate(pacer, busy, paused=lambda: self._counters.add("repair_pauses"))

    def _shared_interface(self) -> str:
        """The interface to whose other traffic copies give way; empty: to none."""
        used = self._interface
        # All nodes of this machine and whatever else it says to itself share the loopback: nobody's link is full there.
        if self._config.pacing == "off" or used is None or "127.0.0.1" in used.addresses:
            return ""
        return used.name

    def _log_lane(self) -> None:
        logger.info(
            "the lane is at %s, on %s",
            self._config.lane_address,
            self._interface or "no interface that is known here",
        )
        if self._faster_interface is not None:
            logger.warning(
                "the lane does not use the fastest interface that is up, %s: see lane_host",
                self._faster_interface,
            )

    def _lane_report(self) -> peer_pb2.LaneReport:
        used, faster = self._interface, self._faster_interface
        return peer_pb2.LaneReport(
            address=self._config.lane_address,
            interface=used.name if used else "",
            speed_mbit_per_s=used.speed_mbit_per_s if used else 0,
            faster_interface=faster.name if faster else "",
            faster_mbit_per_s=faster.speed_mbit_per_s if faster else 0,
            tls=self._config.lane_tls,
            pacing=self.pacing.report(),
        )

    def facts(self) -> data_metrics.DataFacts:
        """This process at this moment, for whoever watches."""
        usage = self.store.usage()
        kinds = Counter(held.kind for held in self.store.held())
        scrub_age_ms = self.maintenance.scrub_age_ms()
        return data_metrics.DataFacts(
            counters=self._counters.snapshot(),
            durations=self._durations.families(),
            ram_used_bytes=usage.used_bytes - usage.free_bytes,
            ram_free_bytes=usage.free_bytes,
            ram_budget_bytes=usage.budget_bytes,
            scrub_age_s=None if scrub_age_ms is None else scrub_age_ms / 1000,
            scrub_period_s=self._config.scrub_period_s,
            replicas={
                "owner": kinds[common_pb2.REPLICA_KIND_OWNER],
                "copy": kinds[common_pb2.REPLICA_KIND_COPY],
            },
            copies_arriving=self.receiver.arriving,
            seats=self.saving.seats,
            jobs=self.saving.progress(),
            job_ram_bytes=self.store.job_bytes(),
            job_budget_bytes=self.store.job_budget_bytes,
        )

    async def _on_view(self, seen: registry_pb2.ClusterView) -> None:
        """Go by a new view. What takes long is only begun here: the next view waits for this."""
        self.assumed()
        self.registry.use_voters(seen.voter_records)
        await asyncio.to_thread(self._remember_voters, seen)
        self.saving.note_view()

    def _brought(self, shards: Sequence[Replica]) -> None:
        self.maintenance.brought(shards)

    def assumed(self) -> None:
        """There is a new life of this node, or a new view."""
        self.resume()
        self.maintenance.changed()

    def _remember_voters(self, seen: registry_pb2.ClusterView) -> None:
        """Keep the voters for the agent, which starts and stops by them, and for the next start."""
        try:
            remember(self._config, [voter_of(record) for record in seen.voter_records], seen.version)
        except (OSError, ConfigError) as error:
            logger.warning("the registry's voters cannot be kept in state_dir: %s", error)

    def resume(self) -> None:
        """Carry on, once, with what an earlier life had staged; needs to know the view and who this node is."""
        if self._resumed or not self.identity.incarnation or not self.view.view.version:
            return
        self._resumed = True
        if count := self.saving.resume():
            logger.info("carrying on with %d staged steps of an earlier life", count)

    async def close(self) -> None:
        """Let go of everything but the bytes."""
        await self.receiver.stop()
        await asyncio.to_thread(self.server.stop)
        await self.client.close()
        await self.registry.close()
        self.hashing.shutdown(wait=False, cancel_futures=True)
        self.lanes.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.codec.close)
        self.store.close()


def _tokens(config: Config) -> Tokens | None:
    """Whose trainers' tokens are, if they show any."""
    if config.token_jwks_file is None:
        return None
    try:
        from ..tokens import Tokens  # noqa: PLC0415  the libraries come with an extra, and take a moment to load
    except ImportError as error:
        raise ConfigError(
            f"config key 'token_jwks_file' needs a library that is not installed ({error.name}): pip install "
            "'fastcheck[tokens]'"
        ) from None
    return Tokens(config)


async def run(config: Config) -> None:
    """The data process; returns after SIGTERM."""
    stopping = stop_signal()
    admission = Admission(config.cluster_id, tokens=_tokens(config))
    counters = Counters()
    store = await _open_store(config, counters)
    process = _DataProcess(config, store, counters)
    far = grpc.aio.server(options=server_options(REQUEST_BYTES_MAX), interceptors=[admission])
    peer_pb2_grpc.add_PeerServiceServicer_to_server(process.peer_service, far)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(process.trainer_service, far)
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), far)
    listen_tcp(far, process.dialer, config.data_address, "data_port")
    near = grpc.aio.server(
        options=server_options(REQUEST_BYTES_MAX, keepalive=False), interceptors=[admission]
    )
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(process.trainer_service, near)
    control = DataControlService(
        process.identity, process.lease, store, process.view, on_assume=process.assumed
    )
    node_pb2_grpc.add_DataControlServiceServicer_to_server(control, near)
    observed = ObserveService(lambda: data_metrics.families(process.facts()))
    observe_pb2_grpc.add_ObserveServiceServicer_to_server(observed, near)
    process.server.start()
    try:
        async with listening(far), listening(near, config.data_socket), watching_crowds():
            following = asyncio.create_task(process.view.run(), name="view")
            pacing = asyncio.create_task(process.pacing.run(), name="pacing")
            process.maintenance.start()
            logger.info("%d shards adopted from %s", len(store.held()), config.ram_dir)
            await asyncio.wait({stopping, following, pacing}, return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
            pacing.cancel()
            await process.maintenance.stop()
            await process.saving.stop()
            await asyncio.gather(following, pacing, return_exceptions=True)
        if not pacing.cancelled():
            pacing.result()  # a defect: this process starts anew rather than go on without a rate
    finally:
        await process.close()


async def _open_store(config: Config, counters: Counters) -> ReplicaStore:
    """Take over the RAM directory, giving a process that is just ending a moment to let go of it."""
    give_up_at = time.monotonic() + STORE_PATIENCE_S
    while True:
        try:
            return await asyncio.to_thread(
                ReplicaStore.open,
                config.ram_dir,
                budget_bytes=config.ram_budget_bytes,
                job_budget_bytes=config.job_budget_bytes,
                counters=counters,
            )
        except StoreError as error:
            if time.monotonic() > give_up_at:
                raise ConfigError(str(error)) from error
        await asyncio.sleep(STORE_PATIENCE_S / 10)
