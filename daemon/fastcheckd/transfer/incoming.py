"""An incoming copy of a shard: which of its chunks are there and proved, and who may still write.

Its memory goes back only when the last connection that might write into it has let go. Where the bytes go
is the target's matter, sockets live in `lane_server.py`, the decision who may put in `put_desk.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fastcheck_proto.v1 import common_pb2 as pb

from ..codec.encoder import Use
from ..digests import DIGEST_BYTES
from ..errors import FrameError, InvalidRequestError
from ..store.ram_store import HeldShard
from .codec_uses import summed
from .targets import Target

_MISSING, _COMING, _HERE = 0, 1, 2


class IncomingShard:
    """One shard under way to this node. Thread-safe.

    Chunks are divided among connections by `first`; no two connections may have the same one, so no
    chunk is ever written by two threads, none twice, and none after `seal`.
    """

    def __init__(
        self,
        manifest: pb.ShardManifest,
        target: Target,
        *,
        streams: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self.target = target
        self.table = target.table
        self.streams = streams
        self._clock = clock
        self._lock = threading.Lock()
        #: Open connections by their first chunk, and how to end each.
        self._lanes: dict[int, Callable[[], None]] = {}
        self._used_firsts: set[int] = set()
        #: No byte is written any more: sealed or abandoned.
        self._shut = False
        self._abandoned = False
        self._released = False
        self._last_progress_s = clock()
        # Written by the one thread at a time that has the chunk, read after its connection is done.
        self._states = bytearray(len(self.table))
        self._digests = bytearray(len(self.table) * DIGEST_BYTES)
        self._uses: list[tuple[Use, ...]] = [()] * len(self.table)

    @property
    def idle_s(self) -> float:
        """Seconds since the last sign of life; 0 while a connection is open: that has its own deadline."""
        with self._lock:
            return 0.0 if self._lanes else self._clock() - self._last_progress_s

    def attach(self, first: int, stride: int, end: Callable[[], None]) -> None:
        """A connection starts; `end` makes its thread stop soon.

        Raises:
            FrameError: its chunks are not its own, or the transfer is over.
        """
        with self._lock:
            if self._shut:
                raise FrameError("the transfer is over; begin a new one")
            if stride != self.streams:
                raise FrameError(f"the transfer has {self.streams} connections; stride {stride} does not fit")
            if first in self._used_firsts:
                raise FrameError(f"another connection already carries the chunks from {first}")
            self._used_firsts.add(first)
            self._lanes[first] = end

    def detach(self, first: int) -> None:
        """The connection will write no more. Harmless when repeated."""
        with self._lock:
            self._last_progress_s = self._clock()
            self._lanes.pop(first, None)
        self._release_if_unused()

    def expect(self, index: int) -> None:
        """A chunk comes.

        Raises:
            FrameError: it is there already; a patched chunk could not be checked against its base again.
        """
        if self._states[index] != _MISSING:
            raise FrameError(f"chunk {index} came already")
        self._states[index] = _COMING

    def arrived(self, index: int, digest: bytes, uses: tuple[Use, ...]) -> None:
        """A chunk is in place; `digest` is that of its bytes, computed here."""
        self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest
        self._uses[index] = uses
        self._states[index] = _HERE

    def came_bad(self, index: int) -> None:
        """A chunk has to come again."""
        self._states[index] = _MISSING

    def missing(self, chunks: range) -> list[int]:
        """Those of `chunks` that are not there."""
        return [index for index in chunks if self._states[index] != _HERE]

    def seal(self) -> bytes:
        """End of the transfer: all chunk digests, as computed here. Nothing is written after it.

        Raises:
            InvalidRequestError: a connection is still open, or chunks are missing.
        """
        with self._lock:
            if self._lanes:
                raise InvalidRequestError(f"{len(self._lanes)} connections of the transfer are still open")
            self._shut = True
        missing = self.missing(range(len(self.table)))
        if missing:
            raise InvalidRequestError(
                f"{len(missing)} of {len(self.table)} chunks never arrived, the first is {missing[0]}"
            )
        return bytes(self._digests)

    def publish(self, manifest: pb.ShardManifest) -> HeldShard:
        """After `seal`: make the copy visible. `manifest` is given how the bytes came."""
        del manifest.codecs[:]
        for use in summed(use for uses in self._uses for use in uses):
            manifest.codecs.add(codec=use.codec, raw_bytes=use.raw_bytes, encoded_bytes=use.encoded_bytes)
        return self.target.publish(manifest)

    def abandon(self) -> None:
        """Give back what is not published as soon as no connection writes into it; slow for a patch, which is
        undone, in whichever thread lets go last. Also after success. Harmless when repeated."""
        with self._lock:
            self._shut = self._abandoned = True
            ends = list(self._lanes.values())
        for end in ends:
            end()
        self._release_if_unused()

    def _release_if_unused(self) -> None:
        with self._lock:
            if not self._abandoned or self._lanes or self._released:
                return
            self._released = True
        self.target.abandon()
