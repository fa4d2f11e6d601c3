"""The registry process of a voter: engine, leader's work and gRPC face, wired and started in order."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from prometheus_client.metrics_core import Metric

from fastcheck_proto.v1 import observe_pb2_grpc, registry_pb2_grpc

from ..config import Config
from ..dialer import Dialer
from ..durations import REGISTRY, Durations
from ..errors import ConfigError, RegistryError
from ..health.detector import FailureDetector
from ..observe import registry_metrics
from ..observe.registry_metrics import LeaderFacts, VoterFacts
from ..observe.scrape import ObserveService
from ..registry.leader import Leader
from ..registry.nodes import LEFT
from ..registry.outward import GrpcStubs, Outward, Stubs
from ..registry.raft.adapter import Raft
from ..registry.raft.consensus import Consensus
from ..registry.raft.disk import free_bytes
from ..registry.raft.environment import check_port_is_free
from ..registry.reports import Reports
from ..rpc import server_options
from ..services.admission import Admission
from ..services.registry import RegistryService
from .runtime import (
    LIVENESS_INTERVAL_S,
    LivenessPipe,
    listening,
    private_directory,
    stop_signal,
    watching_crowds,
)

logger = logging.getLogger(__name__)

#: The largest are an inventory's thousand entries, and the report of a rank with 64 shards, 16 holders each.
REQUEST_BYTES_MAX = 4 << 20
#: Below this a voter doesn't begin: its log and snapshot are written anew now and then, beside the old ones.
ROOM_BYTES_MIN = 16 << 20
ROOM_PAUSE_S = 1.0
ROOM_TOLD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class VoterEnvironment:
    """What a voter stands on; the simulation brings its own of each."""

    #: Makes the engine from the config and what it has to call after each change.
    engine: Callable[[Config, Callable[[], None]], Consensus] = Raft
    #: The way to nodes, holders and other voters; by default over the network.
    outward: Outward | None = None
    #: The way to the leader for forwarded calls; by default over the network. Whoever gives one closes it.
    stubs: Stubs | None = None
    #: Whom the arbiter asks to ask others.
    draw: random.Random | None = None
    #: The wall clock, for what people are shown.
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000


class RegistryServer:
    """One voter. Start and stop it in the main thread's event loop.

    Args:
        config: of a node that is among the voters.

    Raises:
        ConfigError: the node is no voter.
    """

    def __init__(self, config: Config, environment: VoterEnvironment | None = None) -> None:
        environment = environment or VoterEnvironment()
        self._config = config
        self._dialer = Dialer.of(config)
        self._raft = environment.engine(config, self._changed)
        self._detector = FailureDetector(
            suspect_after_s=config.suspect_after_s,
            down_after_s=config.down_after_s,
            hush_s=2 * config.heartbeat_interval_s,
        )
        self._reports = Reports(self._raft, config, wall_ms=environment.wall_ms)
        self._leader = Leader(
            config,
            self._raft,
            self._reports,
            self._detector,
            self._suspects_changed,
            draw=environment.draw,
            wall_ms=environment.wall_ms,
            outward=environment.outward or Outward(self._dialer),
        )
        self._stubs = GrpcStubs(self._dialer, self._node_at)
        #: The gRPC face.
        self.service = RegistryService(
            config, self._raft, self._leader, self._reports, self._detector, environment.stubs or self._stubs
        )
        self._epoch = -1
        self._failed = asyncio.Event()

    async def start(self) -> None:
        """Join the other voters and serve.

        Raises:
            ConfigError: a port is taken, the key is missing, or the state directory needs the operator.
        """
        voter = self._config.own_voter
        assert voter is not None, "Raft checks it"
        self._raft.start()
        try:
            check_port_is_free(voter.registry_address, "registry_address")
            admission = Admission(self._config.cluster_id, self._voter_ids)
            self._server = grpc.aio.server(
                options=server_options(REQUEST_BYTES_MAX), interceptors=[admission]
            )
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(self.service, self._server)
            health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), self._server)
            try:
                self._dialer.listen(self._server, voter.registry_address)
            except RuntimeError as error:
                raise ConfigError(
                    f"config key 'voters': cannot serve on {voter.registry_address}: {error}"
                ) from None
            await self._server.start()
        except BaseException:
            self._raft.close()
            raise
        self._leading = asyncio.create_task(self.lead())

    async def lead(self) -> None:
        """Lead whenever this voter is elected, for ever; a part of `start`."""
        await self._leader.run()

    async def stop(self) -> None:
        """Stop serving and leave the voters; the log is closed when this returns."""
        self._leading.cancel()
        await asyncio.wait([self._leading])
        await self._server.stop(grace=0.2)
        await self._stubs.close()
        self._raft.close()

    async def wait_failed(self) -> str:
        """Return, with the reason, when this voter can take no part any more: its log cannot be written.

        From then on it decides nothing; the process should end and be started anew.
        """
        await self._failed.wait()
        return self._raft.failure or ""

    def facts(self, durations: Sequence[Metric]) -> VoterFacts:
        """This voter at this moment, for whoever watches; `durations`: what it has measured."""
        leading = None
        if self._leader.ready:
            short = Counter(s.id.job for s in self._leader.repairs.survey().shortages if s.missing)
            leading = LeaderFacts(
                view=self.service.view(), redundancy=self._leader.repairs.redundancy(), short_shards=short
            )
        return VoterFacts(
            has_leader=self._raft.leader is not None,
            term=self._raft.term,
            epoch=self._raft.read(lambda state: state.epoch),
            schema=self._raft.read(lambda state: state.schema),
            voters=len(self._raft.voters),
            durations=durations,
            leading=leading,
        )

    def _node_at(self, address: str) -> str:
        """The voter that the engine names with that registry address; empty, which leads nowhere: none any more."""
        return next((v.node_id for v in self._raft.voters if v.registry_address == address), "")

    def _voter_ids(self) -> set[str]:
        return {voter.node_id for voter in self._raft.voters}

    def _changed(self) -> None:
        epoch, lives, left = self._raft.read(
            lambda state: (
                state.epoch,
                [(node.node_id, node.incarnation) for node in state.nodes.values()],
                [node.node_id for node in state.nodes.values() if node.reason == LEFT],
            )
        )
        if epoch != self._epoch:
            self._epoch = epoch
            self._detector.members(lives, asyncio.get_running_loop().time(), left)
            self.service.forget_except({node_id for node_id, _ in lives})
            self._reports.recheck()
        self._leader.changed()
        self.service.changed()
        if self._raft.failure is not None and not self._failed.is_set():
            logger.critical("registry: this voter stops: %s", self._raft.failure)
            self._failed.set()

    def _suspects_changed(self) -> None:
        self.service.changed()


class EngineLiveness:
    """Tells the parent that both go on, the event loop and the engine's thread."""

    def __init__(self, liveness: LivenessPipe) -> None:
        self._liveness = liveness
        self._ticked = False

    def tick(self) -> None:
        """The engine's thread has come round."""
        self._ticked = True

    async def tell(self) -> None:
        """Give a sign of life now and then, as long as the engine comes round too."""
        while True:
            if self._ticked:
                self._ticked = False
                self._liveness.write()
            await asyncio.sleep(LIVENESS_INTERVAL_S)


async def _room(config: Config, progress: EngineLiveness) -> None:
    """Return when the state directory has room to vote and to acknowledge.

    A voter on a full disk would be elected, fail at its first entry and end, again and again.
    """
    folder = next(path for path in (config.state_dir, *config.state_dir.parents) if path.exists())
    told_at = float("-inf")
    while (free := free_bytes(folder)) < ROOM_BYTES_MIN:
        progress.tick()
        now = asyncio.get_running_loop().time()
        if now - told_at >= ROOM_TOLD_S:
            told_at = now
            logger.error(
                "registry: %s has %d bytes free, and a voter needs %d: this one takes no part until there are. "
                "The others go on; free some space there",
                config.state_dir,
                free,
                ROOM_BYTES_MIN,
            )
        await asyncio.sleep(ROOM_PAUSE_S)
    if told_at > float("-inf"):
        logger.warning("registry: %s has room again: this voter takes part", config.state_dir)


async def run(config: Config, liveness: LivenessPipe) -> None:
    """The registry process of a voter; returns after SIGTERM, raises when this voter can go on no more."""
    stopping = stop_signal()
    durations, progress = Durations(REGISTRY), EngineLiveness(liveness)
    beating = asyncio.create_task(progress.tell(), name="signs of life")
    room = asyncio.create_task(_room(config, progress), name="room on disk")
    await asyncio.wait({stopping, room}, return_when=asyncio.FIRST_COMPLETED)
    if not room.done():
        room.cancel()
        beating.cancel()
        return
    room.result()
    server = RegistryServer(
        config, VoterEnvironment(engine=partial(Raft, durations=durations, on_tick=progress.tick))
    )
    await server.start()
    private_directory(config.runtime_dir)
    observed = ObserveService(lambda: registry_metrics.families(server.facts(durations.families())))
    near = grpc.aio.server(options=server_options(), interceptors=[Admission(config.cluster_id)])
    observe_pb2_grpc.add_ObserveServiceServicer_to_server(observed, near)
    failing = asyncio.create_task(server.wait_failed(), name="registry-failure")
    try:
        ends: set[asyncio.Future[Any]] = {stopping, failing}
        async with listening(near, config.registry_socket), watching_crowds():
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise RegistryError(f"this voter stops, to be started anew: {failing.result()}")
    finally:
        failing.cancel()
        beating.cancel()
        await server.stop()
