"""Where the chunks of an incoming copy go: into memory of its own, or into the older step's replica.

Whole: a segment that was reserved for it. Patch: the holder's newest replica, changed in place, with the
way back written first (docs/codec.md). Both check a chunk before it counts; neither knows of connections.
"""

from __future__ import annotations

from typing import Protocol

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.decoder import decode, raw_way_back, read_header, turn_around
from ..codec.encoder import Use
from ..codec.format import Header
from ..counters import Counters
from ..digests import chunk_digest
from ..errors import CodecError
from ..store.copying import copy_bytes
from ..store.patches import Patch
from ..store.ram_store import HeldShard, RamStore, Segment
from .codec_uses import raw_use
from .frames import Codec, FrameHeader


class Target(Protocol):
    """Takes an incoming shard chunk by chunk. `settle` is called from several threads, never for one chunk twice
    at once; `publish` when all are settled; `abandon` once at the very end, with or without a `publish` before."""

    table: ChunkTable

    def place(self, header: FrameHeader) -> memoryview | None:
        """Where this payload may be received; None: only `settle` may put it in place."""

    def settle(self, header: FrameHeader, payload: memoryview) -> tuple[Use, ...]:
        """Check a payload and put its chunk in place; how it came.

        Raises:
            CodecError: it is damaged, or for another base. MispredictedError: whole, but not what was meant.
            StoreError: there is no room.
        """

    def publish(self, manifest: pb.ShardManifest) -> HeldShard:
        """Make the copy visible. Raises StoreError, and the transfer is then over."""

    def abandon(self) -> None:
        """Give back what is not published. May be slow."""


class WholeTarget:
    """A segment that the transfer owns."""

    def __init__(self, store: RamStore, segment: Segment, table: ChunkTable, *, step: int) -> None:
        self.table = table
        self._store = store
        self._segment = segment
        self._view = segment.view[: table.shard_bytes]
        self._step = step
        #: Whether its pages were never touched before.
        self.fresh_memory = segment.tenants == 1

    def place(self, header: FrameHeader) -> memoryview | None:
        """Raw chunks go straight to their place."""
        return self._chunk(header.chunk) if header.codec == Codec.RAW else None

    def settle(self, header: FrameHeader, payload: memoryview) -> tuple[Use, ...]:
        """Hash a raw chunk where it lies, decode an encoded one there."""
        if header.codec == Codec.RAW:
            _check_raw(header, payload)
            return raw_use(len(payload))
        encoded = read_header(payload)
        _check_encoded(header, encoded, self._step)
        return decode(payload, None, self._chunk(header.chunk))

    def publish(self, manifest: pb.ShardManifest) -> HeldShard:
        """Name the segment in a manifest."""
        return self._store.publish(manifest, self._segment, 0, verified=True)

    def abandon(self) -> None:
        """Let the segment go; what is published in it keeps it."""
        self._view.release()
        self._store.release(self._segment)

    def _chunk(self, index: int) -> memoryview:
        start, stop = self.table.range(index)
        return self._view[start:stop]


class PatchTarget:
    """The replica of an older step, which becomes the newer one in place."""

    def __init__(self, patch: Patch, base: HeldShard, counters: Counters, *, step: int) -> None:
        self.table = patch.chunks
        self._patch = patch
        self._base = base
        self._counters = counters
        self._step = step
        self._over = False

    @property
    def wanted(self) -> bool:
        """Whether a reader needs the older step."""
        return self._patch.wanted

    def place(self, header: FrameHeader) -> memoryview | None:
        """Nowhere: the new bytes must be complete elsewhere before a chunk is touched."""
        return None

    def settle(self, header: FrameHeader, payload: memoryview) -> tuple[Use, ...]:
        """New bytes into a slot, checked; the way back; then both to the store."""
        index = header.chunk
        old = self._patch.old(index)
        if header.codec == Codec.RAW:
            _check_raw(header, payload)
            if not self._keeps(header, old):
                way_back = raw_way_back(
                    old,
                    step=self._base.key.step,
                    newer_step=self._step,
                    digest=self._base.chunk_digest(index),
                    newer_digest=header.digest,
                )
                with self._patch.slot() as slot, slot[: len(payload)] as new:
                    copy_bytes(new, payload)
                    self._patch.replace(index, new, way_back)
            return raw_use(len(payload))
        encoded = read_header(payload)
        _check_encoded(header, encoded, self._step)
        if encoded.needs_base and encoded.base_step != self._base.key.step:
            raise CodecError(f"chunk {index} was encoded against step {encoded.base_step}")
        if self._keeps(header, old):
            return (Use("same", header.raw_bytes, len(payload)),)
        with self._patch.slot() as slot:
            new = slot[: header.raw_bytes]
            uses = decode(payload, old, new, base_digest=self._base.chunk_digest(index))
            self._patch.replace(index, new, turn_around(payload, old, new))
        return uses

    def publish(self, manifest: pb.ShardManifest) -> HeldShard:
        """The newer step is the one whose bytes are here."""
        held = self._patch.publish(manifest)
        self._over = True
        self._counters.add("patches_applied")
        return held

    def abandon(self) -> None:
        """Back to the older step, unless the newer is published."""
        if not self._over:
            self._over = True
            self._counters.add("patches_undone")
            self._patch.abort()

    def _keeps(self, header: FrameHeader, old: memoryview) -> bool:
        """Leave a chunk as it is if it is the older step's, and really so: what is acknowledged was hashed."""
        index = header.chunk
        if header.digest != self._base.chunk_digest(index) or chunk_digest(old) != header.digest:
            return False
        self._patch.keep(index)
        return True


def _check_raw(header: FrameHeader, payload: memoryview) -> None:
    if chunk_digest(payload) != header.digest:
        raise CodecError(f"chunk {header.chunk} arrived damaged")


def _check_encoded(header: FrameHeader, encoded: Header, step: int) -> None:
    agrees = (encoded.raw_bytes, encoded.digest, encoded.step) == (header.raw_bytes, header.digest, step)
    if not agrees:
        raise CodecError(f"chunk {header.chunk} is not the one that its frame announced")
