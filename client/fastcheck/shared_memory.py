"""Saving and loading through the memory that this process shares with the daemon on its node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import grpc
import torch

from fastcheck_proto.seal_record import FOOTER_BYTES, write_record
from fastcheck_proto.v1 import trainer_pb2 as pb

from .ahead import MappedAhead
from .copying import Copier
from .errors import FastCheckError
from .gpu import Cuda, Gpu
from .handle import SaveHandle
from .lazy import LazyCopy
from .lent import HeldSegment
from .pinning import Pinner
from .prefault import Prefaulter
from .progress import Reporter
from .segments import Segment, SegmentCache
from .session import Session
from .state.flatten import FlatState
from .transport import Loaded, Staged, Staging, Timeouts, check_ready, sealed_of

logger = logging.getLogger("fastcheck")

#: Of a seal: its segment, and three numbers.
_RECORD_SLACK_BYTES = 128


class SharedMemory:
    """Bytes through mapped segments, control through the daemon's Unix socket."""

    lazy = True

    def __init__(self, session: Session, copy_threads: int, gpu: Gpu | None = None) -> None:
        self._session = session
        self._daemon = session.daemon
        session.offered = self.warm
        self._cache = SegmentCache()
        self._gpu = Cuda() if gpu is None else gpu
        self._pinner = Pinner(self._gpu)
        self._copier = Copier(copy_threads, self._gpu)
        self._prefaulter = Prefaulter(self._cache, self._pinner.pin_ahead)
        self._copy_threads = copy_threads
        self._unmapping: list[threading.Thread] = []

    def begin(self, step: int, flat: FlatState) -> Staging:
        """Take a segment and copy all but what may come later."""
        begun = self._session.begun()
        sealed = sealed_of(step, flat)
        held, waited_s = self._session.segment(flat.state_bytes, record_bytes(sealed), step)
        sealed.segment_id, sealed.waited_s, sealed.begun_s = held.segment_id, waited_s, begun()
        started = time.monotonic()
        try:
            segment = self._cache.get(held.ref)
            if any(self._gpu.takes(piece.tensor) for piece in flat.pieces):
                self._pinner.pin(segment)
            self._copier.copy(flat, segment.tensor, warm=segment.warm)
            later = LazyCopy(flat, segment, self._copier, self._gpu)
        except BaseException:
            self._session.give_back(held)
            raise
        return _Staging(self._session, held, segment, sealed, later, time.monotonic() - started)

    def prepare(self, state_bytes: int, record_bytes: int) -> None:
        """Have memory set aside and its pages touched; returns when the segments of the first saves are warm."""
        deadline = time.monotonic() + self._session.timeout_s
        reserved = self._session.reserve(state_bytes, record_bytes)
        held = self._session.wait_held(reserved.offered, deadline)
        self._prefaulter.offer([each.ref for each in held], self._copy_threads)
        self._prefaulter.wait(deadline)

    def warm(self, ref: pb.SegmentRef) -> None:
        """Touch the pages of a segment that a later save will get."""
        self._prefaulter.offer([ref])

    @contextmanager
    def load(
        self, request: pb.LoadRequest, patience: Timeouts, *, allow_lossy: bool, reporter: Reporter
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
            loaded = Loaded(ready, segment.tensor[: ready.state_bytes], self._copier.pour, ahead.parse)
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

    def interrupt(self) -> None:
        """Touch no more pages."""
        self._prefaulter.close()

    def close(self) -> None:
        """End threads, forget mappings."""
        for thread in self._unmapping:
            thread.join()
        self._prefaulter.close()
        self._copier.close()
        self._cache.close()


class _Staging:
    """A save in a segment. Holds the segment, so that the mapping outlives the copy."""

    def __init__(
        self,
        session: Session,
        held: HeldSegment,
        segment: Segment,
        sealed: pb.Sealed,
        later: LazyCopy,
        eager_s: float,
    ) -> None:
        self._session = session
        self._held = held
        self._segment: Segment | None = segment
        self._sealed = sealed
        self._later = later
        self._eager_s = eager_s

    def hold(self) -> None:
        """Returns when what is left to copy may change."""
        self._later.hold()

    def finish(self, handle: SaveHandle) -> None:
        """Copy what is left and seal, or keep the segment for the next save."""
        segment, self._segment = self._segment, None
        assert segment is not None
        try:
            self._later.run()
            segment.warm = True
            staged = Staged(
                waited_s=self._sealed.waited_s,
                stage_s=self._eager_s + self._later.seconds,
                lazy_bytes=self._later.bytes,
            )
            record = partial(write_record, segment.window(), self._held.segment_id)
            self._session.seal(self._held, self._sealed, handle, staged, record)
        except BaseException:
            self._session.give_back(self._held)
            raise


def record_bytes(sealed: pb.Sealed) -> int:
    """What the record of a seal takes in its segment, before all of it is known."""
    return sealed.ByteSize() + _RECORD_SLACK_BYTES + FOOTER_BYTES


def _answer(stream: Iterator[pb.LoadResponse], ahead: MappedAhead, reporter: Reporter) -> pb.LoadReady | None:
    for message in stream:
        event = message.WhichOneof("event")
        if event == "progress":
            reporter.news(message.progress)
        elif event == "segment":
            ahead.expect(message.segment)
        elif event == "ready":
            reporter.all_here(message.ready.state_bytes, message.ready.holders)
            return message.ready
        elif event == "nothing":
            return None
        else:
            break
    raise FastCheckError("the daemon ended a load without an answer: see its log")
