"""A replica that this node holds, and what is shared among those of one shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..digests import DIGEST_BYTES
from ..errors import NotHeldError
from .chunk import Chunk
from .manifests import ReplicaId, replica_id
from .segments import Segment


@dataclass(eq=False)
class Replica:
    """One published replica. Its bytes stay put while it is open, see `ReplicaStore.reading`."""

    #: Not to be changed.
    manifest: pb.ShardManifest
    #: In order.
    content: tuple[Chunk, ...]
    #: When the bytes were last checked, Unix milliseconds; 0: not since this process has them. The index sets it.
    verified_at_ms: int

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

    @cached_property
    def chunks(self) -> ChunkTable:
        """Where its chunks begin and end."""
        return ChunkTable.of(self.manifest)

    @property
    def is_whole(self) -> bool:
        """Whether no chunk has to be decoded."""
        return all(chunk.is_raw for chunk in self.content)

    @property
    def segment(self) -> Segment | None:
        """The segment in which all of it lies, in order; None: it lies in slots, is a reverse delta, or has no
        bytes."""
        forms = [chunk.form for chunk in self.content]
        if not forms or any(form.base is not None or form.place.slot_bytes for form in forms):
            return None
        places = [form.place for form in forms]
        file = places[0].file
        together = all(b.file is file and a.offset + a.length == b.offset for a, b in pairwise(places))
        return file if together else None

    @property
    def offset(self) -> int:
        """Where its first byte lies in `segment`; 0 without bytes."""
        return self.content[0].form.place.offset if self.content else 0

    @property
    def view(self) -> memoryview:
        """Exactly the shard's bytes in their segment, read-only: what is published is sealed.

        Raises:
            NotHeldError: they do not lie together.
        """
        segment = self.segment
        if segment is None:
            raise NotHeldError(f"the bytes of shard {tuple(self.id)} do not lie in one segment")
        return segment.view[self.offset : self.offset + self.manifest.bytes].toreadonly()

    @property
    def stored_bytes(self) -> int:
        """Memory that its own chunks take, in their present form. What several replicas share counts for each."""
        return sum(chunk.form.place.slot_bytes or chunk.form.place.length for chunk in self.content)

    def chunk_digest(self, index: int) -> bytes:
        """What a chunk's digest has to be."""
        return self.manifest.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


class HistoryId(NamedTuple):
    """Of which shard, and of which kind, replicas are."""

    job: str
    rank: int
    shard: int
    kind: int

    @classmethod
    def of(cls, name: ReplicaId) -> HistoryId:
        """That of a replica."""
        return cls(name.job, name.rank, name.shard, name.kind)


class Listing(Protocol):
    """Something that needs chunks of a history: a replica, or a draft of one."""

    @property
    def id(self) -> ReplicaId:
        """What it is or is going to be."""
        ...

    @property
    def content(self) -> Sequence[Chunk | None]:
        """Its chunks, as far as they are here."""
        ...


@dataclass(eq=False)
class History:
    """The replicas of one shard of one rank and kind, and the chunks that they share. Guarded by the index's lock."""

    #: By step.
    replicas: dict[int, Replica] = field(default_factory=dict)
    #: Chunks of copies, by digest.
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    #: Drafts of it: they share its chunks.
    drafts: set[Listing] = field(default_factory=set)
    #: Rises whenever a manifest of it, written from what was true before, would be wrong.
    version: int = 0

    def is_unused(self) -> bool:
        """Whether nobody needs it."""
        return not self.replicas and not self.drafts
