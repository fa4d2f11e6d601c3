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
from fastcheck_proto.v1 import state_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb

from .copier import Copier
from .errors import CorruptError, FastCheckError
from .gpu import Cuda, Pinner
from .handle import SaveHandle
from .lazy import LazyCopy
from .prefault import Prefaulter
from .progress import Reporter
from .segments import MappedSegment, SegmentCache, map_file, populate
from .session import Session
from .session_memory import HeldSegment
from .state.flatten import FlatState
from .state.header import parse
from .transport import Loaded, Staged, Staging, Timeouts, check_ready, sealed_of

logger = logging.getLogger("fastcheck")

#: Of a seal: its segment, and three numbers.
_RECORD_SLACK_BYTES = 128
#: Of a load's segment, what one call has mapped: a few dozen milliseconds, after which an end is noticed.
_SLICE_BYTES = 64 << 20


class SharedMemory:
    """Bytes through mapped segments, control through the daemon's Unix socket."""

    lazy = True

    def __init__(self, session: Session, copy_threads: int) -> None:
        self._session = session
        self._daemon = session.daemon
        session.offered = self.warm
        self._cache = SegmentCache()
        self._gpu = Cuda()
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
        mapping = LoadMapping()
        with self._daemon.errors(patience.connect_s) as link:
            # The segment stays put for as long as this stream is open.
            stream = link.trainer.Load(request, timeout=patience.timeout_s)
            try:
                with self._daemon.guarded(link, stream):
                    ready = _answer(stream, mapping, reporter)
            except BaseException:
                stream.cancel()
                mapping.release()
                raise
        if ready is None:
            stream.cancel()
            mapping.release()
            yield None
            return
        try:
            check_ready(ready, request, allow_lossy=allow_lossy)
            segment = mapping.take(ready.segment)
            loaded = Loaded(ready, segment.tensor[: ready.state_bytes], self._copier.pour, mapping.parse)
            try:
                yield loaded
            finally:
                loaded.state = torch.empty(0, dtype=torch.uint8)
                del segment
        finally:
            self._let_go(mapping, stream)

    def _let_go(self, mapping: LoadMapping, stream: grpc.Call) -> None:
        """Unmap in the background, since that takes a fifth of the copy's time; only then may the daemon reuse it."""

        def unmap() -> None:
            if not mapping.release():
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
        segment: MappedSegment,
        sealed: pb.Sealed,
        later: LazyCopy,
        eager_s: float,
    ) -> None:
        self._session = session
        self._held = held
        self._segment: MappedSegment | None = segment
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


class LoadMapping:
    """The mapping of one load's segment, made while the daemon still checks or fetches its bytes. Used by one thread.

    Having the kernel map its pages (MADV_POPULATE_READ) takes a good part of the time that the copy does, and needs
    none of the bytes. Of those only the header is read before the daemon says that they are good, and what was parsed
    ahead is used only if the header has the very same bytes then.
    """

    def __init__(self) -> None:
        self._ref = pb.SegmentRef()
        self._segment: MappedSegment | None = None
        self._stop = threading.Event()
        self._warming: threading.Thread | None = None
        #: A header's bytes, the size of its state, and what they say: good if they are read again later.
        self._parsed: tuple[bytes, int, state_pb2.StateHeader] | None = None

    def expect(self, news: pb.LoadSegment) -> None:
        """The bytes will probably be in this segment; an earlier guess is forgotten."""
        self.release()
        ref = news.segment
        try:
            segment = map_file(ref, private=True)
        except FastCheckError as error:
            # It may be gone already; if it is the one in the end, mapping it then tells what is wrong.
            logger.debug("not mapping a segment ahead: %s", error)
            return
        self._ref, self._segment, self._stop = ref, segment, threading.Event()
        self._warming = threading.Thread(
            target=_read_ahead,
            args=(segment.tensor, self._stop),
            name="fastcheck-ahead",
            daemon=True,
        )
        self._warming.start()
        if news.header_bytes:
            self._parse(news)

    def _parse(self, news: pb.LoadSegment) -> None:
        assert self._segment is not None
        data = self._segment.read(news.header_offset, news.header_bytes)
        try:
            self._parsed = data, news.state_bytes, parse(data, news.state_bytes)
        except CorruptError as error:
            # Nobody has checked these bytes yet. Bad ones are found by the daemon, others are parsed once more.
            logger.debug("not using a header that was read ahead: %s", error)

    def parse(self, data: bytes, state_bytes: int) -> state_pb2.StateHeader:
        """The header in bytes that were checked, as `state.header.parse` gives it, with what it raises."""
        if self._parsed is not None and self._parsed[:2] == (data, state_bytes):
            return self._parsed[2]
        return parse(data, state_bytes)

    def take(self, ref: pb.SegmentRef) -> MappedSegment:
        """The mapping of the segment that the bytes are in, the one made ahead or a new one.

        The pages that are left go on being mapped beside the copy. Raises what `map_file` does.
        """
        if self._segment is None or self._ref.path != ref.path or self._segment.tensor.numel() < ref.bytes:
            self.release()
            self._ref, self._segment = ref, map_file(ref, private=True)
        return self._segment

    def release(self) -> bool:
        """Unmap; False if something still views the bytes, and has its own copy of them now."""
        self._stop.set()
        self._parsed = None
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        segment, self._segment = self._segment, None
        return segment is None or segment.release()


def _read_ahead(tensor: torch.Tensor, stop: threading.Event) -> None:
    start, size = tensor.data_ptr(), tensor.numel()
    for offset in range(0, size, _SLICE_BYTES):
        if stop.is_set() or not populate(start + offset, min(_SLICE_BYTES, size - offset), write=False):
            return


def record_bytes(sealed: pb.Sealed) -> int:
    """What the record of a seal takes in its segment, before all of it is known."""
    return sealed.ByteSize() + _RECORD_SLACK_BYTES + FOOTER_BYTES


def _answer(
    stream: Iterator[pb.LoadResponse], mapping: LoadMapping, reporter: Reporter
) -> pb.LoadReady | None:
    for message in stream:
        event = message.WhichOneof("event")
        if event == "progress":
            reporter.news(message.progress)
        elif event == "segment":
            mapping.expect(message.segment)
        elif event == "ready":
            reporter.all_here(message.ready.state_bytes, message.ready.holders)
            return message.ready
        elif event == "nothing":
            return None
        else:
            break
    raise FastCheckError("the daemon ended a load without an answer: see its log")
