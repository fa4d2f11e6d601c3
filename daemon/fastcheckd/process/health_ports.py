"""How a node is watched: the agent's HTTP ports and gRPC's health service (docs/operations.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from fastcheck_proto.v1 import registry_pb2

from ..certificates import Certificates
from ..config import Config
from ..durations import Durations
from ..observe.agent_metrics import NodeFacts
from ..observe.http_edge import HttpEdge
from ..observe.routes import health_routes, metrics_route
from ..observe.scrape import NodeScrape
from ..registry.client import RegistryClient
from ..rpc import server_options
from ..services.admission import Admission
from .runtime import listening

SAFE_TO_STOP_TIMEOUT_S = 3.0
#: How often gRPC's health service is told whether the node is ready; a probe comes every few seconds.
READY_TOLD_S = 0.5
#: The health service's name of readiness. The empty name is the server: it lives.
READY = "ready"
#: A question that anybody may ask holds the name of a service; and of one connection so many at once.
PROBE_BYTES_MAX = 4096
PROBES_MAX = 8


@contextlib.asynccontextmanager
async def health_ports(
    config: Config,
    facts: Callable[[], NodeFacts],
    durations: Durations,
    registry: RegistryClient,
    health: health_aio.HealthServicer,
    certificates: Certificates | None,
) -> AsyncIterator[None]:
    """Answer those who watch while the context lasts; ConfigError where an address is taken."""
    scrape = NodeScrape(config, facts, durations, lambda: certificates.ends_at_s() if certificates else None)
    request = registry_pb2.SafeToStopRequest(node_id=config.node_id)
    questions = health_routes(facts, lambda: registry.safe_to_stop(request, SAFE_TO_STOP_TIMEOUT_S))
    # A server of its own, with nothing else on it: whoever reaches the plaintext port gets to this one alone.
    health_only = grpc.aio.server(
        options=server_options(PROBE_BYTES_MAX, calls_max=PROBES_MAX),
        interceptors=[Admission(config.cluster_id)],
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, health_only)
    ports = {
        "metrics_address": HttpEdge({**metrics_route(scrape.text), **questions}, config.health_socket),
        "health_address": HttpEdge(questions, config.health_socket),
    }
    telling = asyncio.create_task(_tell_whether_ready(health, facts), name="readiness")
    async with listening(health_only, config.health_socket):
        try:
            for key, edge in ports.items():
                if address := getattr(config, key):
                    await edge.start(address, key)
            yield
        finally:
            telling.cancel()
            for edge in ports.values():
                await edge.stop()
            await scrape.close()


async def _tell_whether_ready(health: health_aio.HealthServicer, facts: Callable[[], NodeFacts]) -> None:
    while True:
        ready = not facts().why_not_ready()
        serving = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        await health.set(READY, serving)
        await asyncio.sleep(READY_TOLD_S)
