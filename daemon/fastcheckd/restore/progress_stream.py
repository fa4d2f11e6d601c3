"""A load or a read under way, with news of it for whoever waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from fastcheck_proto.v1 import trainer_pb2 as tpb

from .tally import Tally

#: Between two pieces of news.
NEWS_S = 0.25
#: Where the bytes will be is worth knowing at once: a load from local memory takes little longer. Later looks for it
#: come at twice the pause each.
FIRST_LOOK_S = 0.005


class _Closable(Protocol):
    def close(self) -> None:
        """Let go of the memory."""


R = TypeVar("R", bound=_Closable)


class ProgressStream(Generic[R]):
    """Of `bring`, which follows itself in the tally that it is given. Begins at once; `close` it in any case."""

    def __init__(self, bring: Callable[[Tally], Coroutine[Any, Any, R | None]], *, follow: bool) -> None:
        self._tally = Tally()
        self._follow = follow
        self._bringing = asyncio.create_task(bring(self._tally), name="load")

    async def news(self) -> AsyncIterator[tpb.LoadProgress | tpb.LoadSegment]:
        """Until the step is here or has failed: where it will be, and how far it is; nothing unless asked for."""
        told = None
        look_s = FIRST_LOOK_S
        while not self._bringing.done():
            is_known = told is not None and told is self._tally.segment
            await asyncio.wait({self._bringing}, timeout=NEWS_S if is_known or not self._follow else look_s)
            look_s = min(NEWS_S, 2 * look_s)
            if self._bringing.done() or not self._follow:
                continue
            segment, where = self._tally.segment, self._tally.where()
            if where is not None and segment is not told:
                told = segment
                yield where
            elif self._tally.total_bytes:
                yield self._tally.look()

    def result(self) -> R | None:
        """After the news: what was brought, None if there is no step; raises what `bring` does."""
        return self._bringing.result()

    async def close(self) -> None:
        """End it if it still goes on, and let go of the memory. Also when cancelled meanwhile."""
        self._bringing.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not self._bringing.done():
            try:
                await asyncio.wait({self._bringing})
            except asyncio.CancelledError as error:
                cancelled = error
        if not self._bringing.cancelled() and self._bringing.exception() is None:
            brought = self._bringing.result()
            if brought is not None:
                brought.close()
        if cancelled is not None:
            raise cancelled
