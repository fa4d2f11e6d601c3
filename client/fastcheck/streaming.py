"""Saving and loading through gRPC streams, for a trainer without a daemon on its node.

Slower than shared memory by far: `save` returns when the last byte has been sent, and at about a
gigabyte a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastcheck_proto.conventions import STREAM_PIECE_BYTES
from fastcheck_proto.v1 import trainer_pb2 as pb

from .copying import contiguous_bytes
from .daemon import Daemon
from .errors import CorruptError, FastCheckError, OutOfMemoryError
from .progress import Reporter
from .segments import Segment, anonymous
from .state.flatten import FlatState
from .transport import Loaded, Patience, Staged, Staging, check_ready, seal_of

#: A link slower than this is of no use; it bounds how long a push may take.
_BYTES_PER_S_MIN = 10_000_000


class _Sent:
    """A save of which nothing is left to do."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged

    def hold(self) -> None:
        """Nothing is left to copy."""

    def finish(self) -> Staged:
        """How it went."""
        return self._staged


class Streams:
    """Bytes and control through one connection to a daemon elsewhere."""

    #: The bytes go in their order, whatever may change when.
    lazy = False

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def begin(self, request: pb.BeginSaveRequest, flat: FlatState, patience: Patience) -> Staging:
        """Send everything; the daemon has sealed it when this returns."""
        started = time.monotonic()
        timeout_s = patience.timeout_s + flat.state_bytes / _BYTES_PER_S_MIN
        with self._daemon.errors(patience.connect_s) as link:
            call = link.trainer.Push.future(_messages(request, flat), timeout=timeout_s)
            with self._daemon.guarded(link, call):
                response = call.result()
        taken_s = time.monotonic() - started
        return _Sent(Staged(waited_s=response.waited_s, stage_s=max(0.0, taken_s - response.waited_s)))

    @contextmanager
    def load(
        self, request: pb.LoadRequest, patience: Patience, *, allow_lossy: bool, reporter: Reporter
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

    def prepare(self, request: pb.BeginSaveRequest, patience: Patience) -> None:
        """Nothing to do: there is no memory of the daemon's that this process could touch."""

    def warm(self, spares: Sequence[pb.SegmentRef]) -> None:
        """Nothing to do: the segments are out of reach from here."""

    def close(self) -> None:
        """Nothing is kept between calls."""


def _messages(request: pb.BeginSaveRequest, flat: FlatState) -> Iterator[pb.PushRequest]:
    yield pb.PushRequest(begin=request)
    buffer = bytearray()
    for data in _ordered_bytes(flat):
        buffer += data
        while len(buffer) >= STREAM_PIECE_BYTES:
            yield pb.PushRequest(data=bytes(buffer[:STREAM_PIECE_BYTES]))
            del buffer[:STREAM_PIECE_BYTES]
    if buffer:
        yield pb.PushRequest(data=bytes(buffer))
    yield pb.PushRequest(seal=seal_of(flat))


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
) -> tuple[pb.LoadReady, Segment] | None:
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
