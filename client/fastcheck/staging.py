"""Saving and loading through the memory that this process shares with the daemon on its node."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastcheck_proto.v1 import trainer_pb2 as pb

from .copying import Copier
from .daemon import Daemon
from .errors import FastCheckError, PartialLoadError
from .prefault import Prefaulter
from .segments import Segment, SegmentCache, map_file
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
                    save_id=begun.save_id, header_offset=flat.header_offset, header_bytes=len(flat.header)
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
    def load(self, request: pb.LoadRequest, patience: Patience) -> Iterator[Loaded | None]:
        """The checkpoint's bytes, valid inside the block; None when there is no committed step."""
        with self._daemon.errors(patience.connect_s) as link:
            # The segment stays put for as long as this stream is open.
            stream = link.trainer.Load(request, timeout=patience.timeout_s)
            with self._daemon.guarded(link, stream):
                ready = _answer(stream)
        try:
            if ready is None:
                yield None
            else:
                check_ready(ready, request)
                yield from _mapped(ready)
        finally:
            stream.cancel()

    def close(self) -> None:
        """End threads, forget mappings."""
        self._prefaulter.close()
        self._copier.close()
        self._cache.close()


def _answer(stream: Iterator[pb.LoadResponse]) -> pb.LoadReady | None:
    message = next(stream, None)
    if message is None or message.WhichOneof("event") is None:
        raise FastCheckError("the daemon ended a load without an answer: see its log")
    return message.ready if message.HasField("ready") else None


def _mapped(ready: pb.LoadReady) -> Iterator[Loaded]:
    segment = map_file(ready.segment, private=True)
    loaded = Loaded(ready, segment.tensor[: ready.state_bytes])
    try:
        yield loaded
    except PartialLoadError:
        # Some of the caller's tensors may be views of the mapping now.
        _release(segment, loaded)
        raise
    else:
        _release(segment, loaded)


def _release(segment: Segment, loaded: Loaded) -> None:
    loaded.state = segment.tensor[:0].clone()
    if not segment.release():
        logger.debug("an object kept a view of step %d's bytes; it has its own copy now", loaded.ready.step)
