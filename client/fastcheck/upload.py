"""Saving and loading through gRPC, for a trainer without a daemon on its node.

Slower than shared memory by far: `save` returns when the daemon has the last byte, at about a gigabyte a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastcheck_proto.conventions import STREAM_PIECE_BYTES
from fastcheck_proto.v1 import trainer_pb2 as pb

from .copier import contiguous_bytes
from .daemon import CONNECT_S
from .errors import CorruptError, FastCheckError, OutOfMemoryError, SaveFailedError
from .handle import SaveHandle
from .progress import Reporter
from .segments import MappedSegment, anonymous
from .session import Session
from .session_memory import HeldSegment
from .state.flatten import FlatState
from .transport import Loaded, Staged, Staging, Timeouts, check_ready, sealed_of

#: A link slower than this is of no use; it bounds how long a push may take.
_BYTES_PER_S_MIN = 10_000_000


class _Sent:
    """A save whose bytes the daemon has."""

    def __init__(self, session: Session, held: HeldSegment, sealed: pb.Sealed, staged: Staged) -> None:
        self._session = session
        self._held = held
        self._sealed = sealed
        self._staged = staged

    def hold(self) -> None:
        """Nothing is left to copy."""

    def finish(self, handle: SaveHandle) -> None:
        """Hand it over; returns when the daemon says that it has it, since nobody finds it if this process dies."""
        self._session.seal(self._held, self._sealed, handle, self._staged, record=None)
        self._session.wait_heard(handle)


class UploadTransport:
    """Bytes through calls to a daemon elsewhere, into segments that the session holds there."""

    #: The bytes go in their order, whatever may change when.
    lazy = False

    def __init__(self, session: Session) -> None:
        self._session = session
        self._daemon = session.daemon

    def begin(self, step: int, flat: FlatState) -> Staging:
        """Send everything; the daemon has it when this returns."""
        begun = self._session.begun()
        sealed = sealed_of(step, flat)
        held, waited_s = self._session.segment(flat.state_bytes, 0, step)
        sealed.segment_id, sealed.waited_s, sealed.begun_s = held.segment_id, waited_s, begun()
        started = time.monotonic()
        session = self._session
        target = pb.UploadTarget(
            job=session.job, rank=session.rank, session=held.session, segment_id=held.segment_id
        )
        try:
            sent = self._daemon.upload(
                _messages(target, flat),
                connect_s=CONNECT_S,
                timeout_s=session.timeout_s + flat.state_bytes / _BYTES_PER_S_MIN,
            )
        except BaseException:
            session.give_back(held)
            raise
        if sent != flat.state_bytes:
            session.give_back(held)
            raise SaveFailedError(f"the daemon has {sent} of the state's {flat.state_bytes} bytes")
        return _Sent(session, held, sealed, Staged(waited_s=waited_s, stage_s=time.monotonic() - started))

    def prepare(self, state_bytes: int, record_bytes: int) -> None:
        """Have memory set aside at the daemon."""
        self._session.reserve(state_bytes, 0)

    @contextmanager
    def load(
        self, request: pb.LoadRequest, patience: Timeouts, *, allow_lossy: bool, reporter: Reporter
    ) -> Iterator[Loaded | None]:
        """Receive everything into memory of our own."""
        with self._daemon.errors(patience.connect_s) as link:
            stream = link.trainer.Pull(pb.PullRequest(load=request), timeout=patience.timeout_s)
            try:
                with self._daemon.guarded(link, stream):
                    received = _receive(stream, request, allow_lossy=allow_lossy, reporter=reporter)
            finally:
                stream.cancel()
        if received is None:
            yield None
            return
        ready, buffer = received
        yield Loaded(ready, buffer.tensor[: ready.state_bytes])

    def interrupt(self) -> None:
        """Nothing is waited for."""

    def close(self) -> None:
        """Nothing is kept between calls."""


def _messages(target: pb.UploadTarget, flat: FlatState) -> Iterator[pb.UploadRequest]:
    yield pb.UploadRequest(target=target)
    buffer = bytearray()
    for data in _ordered_bytes(flat):
        buffer += data
        while len(buffer) >= STREAM_PIECE_BYTES:
            yield pb.UploadRequest(data=bytes(buffer[:STREAM_PIECE_BYTES]))
            del buffer[:STREAM_PIECE_BYTES]
    if buffer:
        yield pb.UploadRequest(data=bytes(buffer))


def _ordered_bytes(flat: FlatState) -> Iterator[bytes]:
    """The rank state from its first byte to its last, gaps between tensors and the padding as zeros."""
    position = 0
    for piece in flat.pieces:
        yield bytes(piece.offset - position)
        yield from contiguous_bytes(piece.tensor, STREAM_PIECE_BYTES)
        position = piece.offset + piece.bytes
    yield bytes(flat.header_offset - position)
    yield flat.header
    yield bytes(flat.state_bytes - flat.header_offset - len(flat.header))


def _receive(
    stream: Iterator[pb.PullResponse], request: pb.LoadRequest, *, allow_lossy: bool, reporter: Reporter
) -> tuple[pb.LoadReady, MappedSegment] | None:
    first = next(stream, None)
    while first is not None and first.HasField("progress"):
        reporter.news(first.progress)
        first = next(stream, None)
    if first is None or first.HasField("data") or first.WhichOneof("part") is None:
        raise FastCheckError("the daemon did not begin a load with what it will send: see its log")
    if first.HasField("nothing"):
        return None
    ready = first.ready
    check_ready(ready, request, allow_lossy=allow_lossy)
    try:
        buffer = anonymous(ready.state_bytes)
    except MemoryError as error:
        raise OutOfMemoryError(f"step {ready.step}: {error}") from None
    position = 0
    for message in stream:
        data = message.data
        if position + len(data) > ready.state_bytes:
            raise CorruptError(
                f"the daemon sent more than the {ready.state_bytes} bytes of step {ready.step}"
            )
        buffer.write(position, data)
        position += len(data)
    if position != ready.state_bytes:
        raise CorruptError(
            f"the daemon sent {position} of the {ready.state_bytes} bytes of step {ready.step}"
        )
    reporter.all_here(ready.state_bytes, ready.holders)
    return ready, buffer
