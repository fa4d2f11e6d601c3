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
from .gpu import Cuda, Gpu
from .lazy import LazyCopy
from .pinning import Pinner
from .prefault import Prefaulter
from .progress import Reporter
from .segments import Segment, SegmentCache
from .state.flatten import FlatState
from .transport import Loaded, Patience, Staged, Staging, check_ready, seal_of

logger = logging.getLogger("fastcheck")


class SharedMemory:
    """Bytes through mapped segments, control through the daemon's Unix socket."""

    lazy = True

    def __init__(self, daemon: Daemon, copy_threads: int, gpu: Gpu | None = None) -> None:
        self._daemon = daemon
        self._cache = SegmentCache()
        self._gpu = Cuda() if gpu is None else gpu
        self._pinner = Pinner(self._gpu)
        self._copier = Copier(copy_threads, self._gpu)
        self._prefaulter = Prefaulter(self._cache, self._pinner.pin_ahead)
        self._copy_threads = copy_threads
        self._unmapping: list[threading.Thread] = []

    def begin(self, request: pb.BeginSaveRequest, flat: FlatState, patience: Patience) -> Staging:
        """Reserve a segment and copy all but what may come later."""
        request.ahead.CopyFrom(seal_of(flat))
        begun = self._daemon.begin_save(request, connect_s=patience.connect_s, timeout_s=patience.timeout_s)
        started = time.monotonic()
        try:
            segment = self._cache.get(begun.segment)
            if any(self._gpu.takes(piece.tensor) for piece in flat.pieces):
                self._pinner.pin(segment)
            self._copier.copy(flat, segment.tensor, warm=segment.warm)
            later = LazyCopy(flat, segment, self._copier, self._gpu)
        except BaseException:
            self.abandon(begun.save_id)
            raise
        return _Staging(self, begun, segment, flat, later, time.monotonic() - started)

    def seal(self, begun: pb.BeginSaveResponse, flat: FlatState) -> None:
        """Hand a filled segment over."""
        request = pb.SealSaveRequest(save_id=begun.save_id, as_begun=begun.read_ahead)
        if not begun.read_ahead:
            said = seal_of(flat)
            request.header_offset, request.header_bytes = said.header_offset, said.header_bytes
            request.layout.CopyFrom(said.layout)
            request.shared_digests.extend(said.shared_digests)
            if said.HasField("shared"):
                request.shared.CopyFrom(said.shared)
        self._daemon.seal_save(request)

    def warm(self, spares: Sequence[pb.SegmentRef]) -> None:
        """Touch the pages of segments that later saves will get."""
        self._prefaulter.offer(spares)

    def prepare(self, request: pb.BeginSaveRequest, patience: Patience) -> None:
        """Reserve a segment, have it warmed and give it back: the first save gets the same one."""
        begun = self._daemon.begin_save(request, connect_s=patience.connect_s, timeout_s=patience.timeout_s)
        self._prefaulter.offer([begun.segment], self._copy_threads)
        self.abandon(begun.save_id)

    def abandon(self, save_id: str) -> None:
        """Give a segment back that will not be sealed."""
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
        shared: SharedMemory,
        begun: pb.BeginSaveResponse,
        segment: Segment,
        flat: FlatState,
        later: LazyCopy,
        eager_s: float,
    ) -> None:
        self._shared = shared
        self._begun = begun
        self._segment: Segment | None = segment
        self._flat: FlatState | None = flat
        self._later = later
        self._eager_s = eager_s

    def hold(self) -> None:
        """Returns when what is left to copy may change."""
        self._later.hold()

    def finish(self) -> Staged:
        """Copy what is left and seal, or give the segment back."""
        flat, self._flat = self._flat, None
        assert flat is not None
        try:
            self._later.run()
            assert self._segment is not None
            self._segment.warm = True
            self._shared.seal(self._begun, flat)
        except BaseException:
            self._shared.abandon(self._begun.save_id)
            raise
        finally:
            self._segment = None
        stage_s = self._eager_s + self._later.seconds
        return Staged(waited_s=self._begun.waited_s, stage_s=stage_s, lazy_bytes=self._later.bytes)


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
