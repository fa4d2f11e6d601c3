"""A scrape: the agent asks the node's other processes for their metrics, and joins them with its own.

A process that does not answer in time costs its own metrics and nothing else; `fastcheck_process_answers` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
from prometheus_client.metrics_core import Metric

from fastcheck_proto.v1 import observe_pb2 as opb
from fastcheck_proto.v1 import observe_pb2_grpc as opb_grpc

from ..config import Config
from ..durations import Durations
from ..rpc import CHANNEL_OPTIONS, answers
from .agent_metrics import NodeFacts, ProcessUsage, families
from .families import exposition

logger = logging.getLogger(__name__)

#: A process that takes longer is busy or hung. Well below the 10 s that Prometheus waits by default.
SCRAPE_TIMEOUT_S = 3.0


class NodeScrape:
    """All metrics of a node.

    Args:
        facts: how the node is now.
        certificate_ends_at_s: when its certificate expires, Unix seconds; None: it has none.
    """

    def __init__(
        self,
        config: Config,
        facts: Callable[[], NodeFacts],
        durations: Durations,
        certificate_ends_at_s: Callable[[], float | None],
    ) -> None:
        self._config = config
        self._facts = facts
        self._durations = durations
        self._certificate_ends_at_s = certificate_ends_at_s
        self._sockets: dict[str, Path] = {"data": config.data_socket, "registry": config.registry_socket}
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def text(self) -> bytes:
        """Of all processes, in Prometheus' text format."""
        facts = self._facts()
        names = [process.name for process in facts.processes if process.name in self._sockets]
        told = dict(zip(names, await asyncio.gather(*map(self._ask, names)), strict=True))
        own = families(
            facts,
            cluster_id=self._config.cluster_id,
            node_id=self._config.node_id,
            ready=not facts.why_not_ready(),
            usage={p.name: used for p in facts.processes if (used := _usage(p.pid)) is not None},
            answered={name: text is not None for name, text in told.items()},
            durations=self._durations.families(),
            certificate_ends_at_s=self._certificate_ends_at_s(),
        )
        return exposition(own) + b"".join(text for text in told.values() if text is not None)

    async def _ask(self, name: str) -> bytes | None:
        if (channel := self._channels.get(name)) is None:
            channel = grpc.aio.insecure_channel(f"unix://{self._sockets[name]}", options=CHANNEL_OPTIONS)
            self._channels[name] = channel
        stub = opb_grpc.ObserveServiceStub(channel)
        try:
            answer: opb.ScrapeResponse = await stub.Scrape(opb.ScrapeRequest(), timeout=SCRAPE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.debug("no metrics of the %s process: %s", name, error.code().name)
            return None
        return answer.exposition

    async def close(self) -> None:
        """End the connections."""
        for channel in self._channels.values():
            await channel.close()


def _usage(pid: int | None) -> ProcessUsage | None:
    with contextlib.suppress(psutil.Error, OSError):  # it is gone, or no descriptor is left to look
        if pid is not None:
            process = psutil.Process(pid)
            times = process.cpu_times()
            return ProcessUsage(process.memory_info().rss, times.user + times.system)
    return None


Context = grpc.aio.ServicerContext[Any, Any]


class ObserveService(opb_grpc.ObserveServiceServicer):
    """Tells the metrics.

    Args:
        look: reads the numbers, in the event loop's thread: they belong to it.
    """

    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    @answers
    async def Scrape(  # noqa: N802  gRPC names it
        self, request: opb.ScrapeRequest, context: Context
    ) -> opb.ScrapeResponse:
        """Everything as it is now."""
        # Writing it down takes longer than looking, and needs nobody.
        return opb.ScrapeResponse(exposition=await asyncio.to_thread(exposition, list(self._look())))
