"""ObserveService: a process' metrics, for its agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc.aio
from prometheus_client.metrics_core import Metric

from fastcheck_proto.v1 import observe_pb2 as opb
from fastcheck_proto.v1 import observe_pb2_grpc as opb_grpc

from ..observe.families import exposition
from ..rpc import answers

Context = grpc.aio.ServicerContext[Any, Any]


class ObserveService(opb_grpc.ObserveServiceServicer):
    """Tells the metrics.

    Args:
        look: reads the numbers, in the event loop's thread: they belong to it.
    """

    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    @answers
    async def Scrape(self, request: opb.ScrapeRequest, context: Context) -> opb.ScrapeResponse:
        """Everything as it is now."""
        # Writing it down takes longer than looking, and needs nobody.
        return opb.ScrapeResponse(exposition=await asyncio.to_thread(exposition, list(self._look())))
