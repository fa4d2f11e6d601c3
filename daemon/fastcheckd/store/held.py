"""A replica that this node holds. A value: what it says is true as long as the store says so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..digests import DIGEST_BYTES, chunk_digest
from ..errors import NotHeldError
from .manifests import ReplicaId, replica_id
from .segments import Segment
from .way_back import WayBackFile


@dataclass(frozen=True)
class WayBack:
    """How an older step is had: from the bytes of a newer one, which stay as long as this one does."""

    file: WayBackFile
    #: The step whose bytes it starts from, of the same job, rank and shard.
    from_step: int


@dataclass(frozen=True, eq=False)
class HeldShard:
    """One published replica. Its bytes stay put while it is pinned, see `RamStore.pinned`."""

    #: Not to be changed.
    manifest: pb.ShardManifest
    #: Where the bytes lie; with a way back, those of the newest step that it leads from.
    segment: Segment
    #: Where the shard's first byte lies in the segment.
    offset: int
    #: When the bytes were last checked, Unix milliseconds. 0: not since this process has them.
    verified_at_ms: int
    #: None: the bytes themselves are here.
    way_back: WayBack | None = None

    @property
    def key(self) -> pb.ShardKey:
        """Which shard it is."""
        return self.manifest.key

    @property
    def kind(self) -> pb.ReplicaKind.ValueType:
        """Whether the owner's own bytes or a copy."""
        return self.manifest.kind

    @cached_property
    def id(self) -> ReplicaId:
        """Key and kind in a form that can be a dictionary's key."""
        return replica_id(self.manifest.key, self.manifest.kind)

    @property
    def is_full(self) -> bool:
        """Whether its bytes lie here as they are; otherwise `RamStore.full` makes them."""
        return self.way_back is None

    @property
    def stored_bytes(self) -> int:
        """Memory that it takes alone."""
        return self.manifest.bytes if self.way_back is None else self.way_back.file.size_bytes

    @cached_property
    def chunks(self) -> ChunkTable:
        """Where its chunks begin and end."""
        return ChunkTable.of(self.manifest)

    @property
    def view(self) -> memoryview:
        """Exactly the shard's bytes, read-only: what is published is sealed.

        Raises:
            NotHeldError: only a way back is here.
        """
        if self.way_back is not None:
            raise NotHeldError(f"shard {tuple(self.id)} is here as a way back only: make it full first")
        return self.segment.view[self.offset : self.offset + self.manifest.bytes].toreadonly()

    def chunk_digest(self, index: int) -> bytes:
        """What a chunk's digest has to be."""
        return self.manifest.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def first_bad_chunk(self) -> int | None:
        """Hash all bytes; index of the first chunk that does not match its digest, None if all do."""
        view = self.view
        for index in range(len(self.chunks)):
            start, stop = self.chunks.range(index)
            if chunk_digest(view[start:stop]) != self.chunk_digest(index):
                return index
        return None
