"""Saving and loading through the memory that this process shares with the daemon on its node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import torch

from fastcheck_proto.v1 import trainer_pb2 as pb

from .ahead import MappedAhead
from .copying import Copier
from .daemon import Daemon
from .errors import FastCheckError
from .prefault import Prefaulter
from .progress import Reporter
from .segments import SegmentCache
from .state.flatten import FlatState
from .transport import Loaded, Patience, Staged, check_ready

logger = logging.getLogger("fastcheck")


class SharedMemory:
    """Bytes through mapped segments, control through the daemon's Unix socket."""

    def __init__(self, daemon: Daemon, copy_threads: int) -> None:
        self._daemon = daemon
        self._cache = SegmentCache()
        self._copier = Copier(copy_threads)
        self._prefaulter = Prefaulter(self._cache)
        self._unmapping: list[threading.Thread] = []

    def save(self, request: pb.BeginSaveRequest, flat: FlatState, patience: Patience) -> Staged:
        """Reserve, copy, seal."""
        begun = self._daemon.begin_save(request, connect_s=patience.connect_s, timeout_s=patience.timeout_s)
        started = time.monotonic()
        try:
            segment = self._cache.get(begun.segment)
            self._copier.copy(flat, segment.tensor)
            stage_s = time.monotonic() - started
            self._daemon.seal_save(
                pb.SealSaveRequest(
                    save_id=begun.save_id,
                    header_offset=flat.header_offset,
                    header_bytes=len(flat.header),
                    layout=flat.layout,
                )
            )
        except BaseException:
            self._abandon(begun.save_id)
            raise
        return Staged(waited_s=begun.waited_s, stage_s=stage_s)

    def warm(self, spares: Sequence[pb.SegmentRef]) -> None:
        """Touch the pages of segments that later saves will get."""
        self._prefaulter.offer(spares)

    def _abandon(self, save_id: str) -> None:
        try:
            self._daemon.abandon_save(save_id)
        except FastCheckError as error:
            # The daemon gives an unsealed segment back by itself when its session saves again.
            logger.debug("could not give a segment back: %s", error)

    @contextmanager
    def load(
        self, request: pb.LoadRequest, patience: Patience, *, allow_lossy: bool, reporter: Reporter
    ) -> Iterator[Loaded | None]:
        """The checkpoint's bytes, valid inside the block; None when there is no committed step."""
        ahead = MappedAhead()
        with self._daemon.errors(patience.connect_s) as link:
            # The segment stays put for as long as this stream is open.
            stream = link.trainer.Load(request, timeout=patience.timeout_s)
            try:
                with self._daemon.guarded(link, stream):
                    ready = _answer(stream, ahead, reporter)
            except BaseException:
                stream.cancel()
                ahead.release()
                raise
        if ready is None:
            stream.cancel()
            ahead.release()
            yield None
            return
        try:
            check_ready(ready, request, allow_lossy=allow_lossy)
            segment = ahead.take(ready.segment)
            loaded = Loaded(ready, segment.tensor[: ready.state_bytes], self._copier.pour)
            try:
                yield loaded
            finally:
                loaded.state = torch.empty(0, dtype=torch.uint8)
                del segment
        finally:
            self._let_go(ahead, stream)

    def _let_go(self, ahead: MappedAhead, stream: grpc.Call) -> None:
        """Unmap in the background, since that takes a fifth of the copy's time; only then may the daemon reuse it."""

        def unmap() -> None:
            if not ahead.release():
                logger.debug("an object kept a view of the checkpoint's bytes; it has its own copy now")
            stream.cancel()

        self._unmapping = [t for t in self._unmapping if t.is_alive()]
        thread = threading.Thread(target=unmap, name="fastcheck-unmap", daemon=True)
        self._unmapping.append(thread)
        thread.start()

    def close(self) -> None:
        """End threads, forget mappings."""
        for thread in self._unmapping:
            thread.join()
        self._prefaulter.close()
        self._copier.close()
        self._cache.close()


def _answer(stream: Iterator[pb.LoadResponse], ahead: MappedAhead, reporter: Reporter) -> pb.LoadReady | None:
    for message in stream:
        event = message.WhichOneof("event")
        if event == "progress":
            reporter.news(message.progress)
        elif event == "segment":
            ahead.expect(message.segment.segment)
        elif event == "ready":
            reporter.all_here(message.ready)
            return message.ready
        elif event == "nothing":
            return None
        else:
            break
    raise FastCheckError("the daemon ended a load without an answer: see its log")
