"""A replica that this node holds. A value: what it says is true as long as the store says so."""

from __future__ import annotations

from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb

from ..digests import DIGEST_BYTES, chunk_count, chunk_digest, chunk_range
from .manifests import ReplicaId, replica_id
from .segments import Segment


@dataclass(frozen=True, eq=False)
class HeldShard:
    """One published replica. Its bytes stay put while it is pinned, see `RamStore.pinned`."""

    #: Not to be changed.
    manifest: pb.ShardManifest
    segment: Segment
    #: Where the shard's first byte lies in the segment.
    offset: int
    #: When the bytes were last checked, Unix milliseconds. 0: not since this process has them.
    verified_at_ms: int

    @property
    def key(self) -> pb.ShardKey:
        """Which shard it is."""
        return self.manifest.key

    @property
    def kind(self) -> pb.ReplicaKind.ValueType:
        """Whether the owner's own bytes or a copy."""
        return self.manifest.kind

    @property
    def id(self) -> ReplicaId:
        """Key and kind in a form that can be a dictionary's key."""
        return replica_id(self.manifest.key, self.manifest.kind)

    @property
    def view(self) -> memoryview:
        """Exactly the shard's bytes, read-only: what is published is sealed."""
        return self.segment.view[self.offset : self.offset + self.manifest.bytes].toreadonly()

    def first_bad_chunk(self) -> int | None:
        """Hash all bytes; index of the first chunk that does not match its digest, None if all do."""
        manifest, view = self.manifest, self.view
        for index in range(chunk_count(manifest.bytes, manifest.chunk_bytes)):
            start, stop = chunk_range(index, manifest.bytes, manifest.chunk_bytes)
            expected = manifest.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if chunk_digest(view[start:stop]) != expected:
                return index
        return None
