"""What a node answers over HTTP: /metrics, /livez, /readyz and /safe-to-stop.

Three questions that are often taken for one. Does it live (else start it anew): the agent answers, so it does; no
quorum and no data process can make a restart of the agent useful. Is it ready (else give it no work, stop rolling
on). May it be stopped (else wait, or drain it): that the registry answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Generic, TypeVar

from fastcheck_proto.v1 import registry_pb2 as rpb

from ..errors import FastCheckdError
from .agent_metrics import NodeFacts
from .families import CONTENT_TYPE
from .http_edge import Handler, Response

T = TypeVar("T")

#: One scrape for all who scrape at once, and for a moment longer.
METRICS_KEPT_S = 0.5
#: The leader proves that it leads for each answer: probes in a row get the same one.
SAFE_TO_STOP_KEPT_S = 2.0


class CachedAnswer(Generic[T]):
    """The outcome of `ask`, errors included; asked at most once at a time, however many want it.

    Args:
        ask: bounded in time by itself.
        keep_s: for so long after it came an answer is given again.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], keep_s: float) -> None:
        self._ask = ask
        self._keep_s = keep_s
        self._asking: asyncio.Task[T] | None = None
        self._good_until = 0.0

    async def get(self) -> T:
        """The answer; raises what asking raised."""
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now >= self._good_until):
            self._asking = asyncio.create_task(self._run())
            # Whoever wanted it may be gone; the error is theirs, not the event loop's.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._asking)

    async def _run(self) -> T:
        try:
            return await self._ask()
        finally:
            self._good_until = asyncio.get_running_loop().time() + self._keep_s


def health_routes(
    facts: Callable[[], NodeFacts], safe_to_stop: Callable[[], Awaitable[rpb.SafeToStopResponse]]
) -> dict[str, Handler]:
    """The three questions, by path.

    Args:
        facts: how the node is now.
        safe_to_stop: asks the registry about this node, within a few seconds.
    """
    shared = CachedAnswer(safe_to_stop, SAFE_TO_STOP_KEPT_S)

    async def livez() -> Response:
        return Response(HTTPStatus.OK, b"ok\n")

    async def readyz() -> Response:
        reasons = facts().why_not_ready()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _json(status, {"ready": not reasons, "reasons": reasons})

    async def may_stop() -> Response:
        try:
            verdict = await shared.get()
        except FastCheckdError as error:
            # Not known is not safe, and not unsafe either.
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"safe": None, "reasons": [str(error)]})
        told = {
            "safe": verdict.safe,
            "survivable": verdict.survivable,
            "reasons": list(verdict.reasons),
            "jobs": list(verdict.jobs),
        }
        return _json(HTTPStatus.OK if verdict.safe else HTTPStatus.PRECONDITION_FAILED, told)

    return {"/livez": livez, "/readyz": readyz, "/safe-to-stop": may_stop}


def metrics_route(scrape: Callable[[], Awaitable[bytes]]) -> dict[str, Handler]:
    """`/metrics`."""
    shared = CachedAnswer(scrape, METRICS_KEPT_S)

    async def metrics() -> Response:
        return Response(HTTPStatus.OK, await shared.get(), CONTENT_TYPE)

    return {"/metrics": metrics}


def _json(status: HTTPStatus, value: object) -> Response:
    return Response(status, json.dumps(value).encode() + b"\n", "application/json")
