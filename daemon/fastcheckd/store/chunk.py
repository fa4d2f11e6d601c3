"""A chunk: some bytes of a shard that never change, in one of two forms.

Raw: its bytes lie in a place. Delta: an encoded chunk lies there (docs/codec.md), and gives the bytes when it is
decoded against another chunk, its base. The form may change while the chunk is in use; the bytes that it stands for
are the same.
"""

from __future__ import annotations

from typing import NamedTuple

from ..codec.decoder import decode
from ..digests import chunk_digest
from ..errors import CodecError, CorruptError
from .slots import Place


class Form(NamedTuple):
    """Where a chunk's bytes are to be had."""

    place: Place
    #: What the encoded chunk in `place` is decoded against; None: the bytes themselves lie there.
    base: Chunk | None = None


class Chunk:
    """Its fields belong to the lock of the index. Compared by identity."""

    __slots__ = ("digest", "form", "references", "size")

    def __init__(self, digest: bytes, size: int, form: Form) -> None:
        #: xxh3-128 of its bytes.
        self.digest = digest
        self.size = size
        self.form = form
        #: Replicas that list it, deltas that are decoded against it, readers and drafts.
        self.references = 0

    @property
    def is_raw(self) -> bool:
        """Whether its bytes lie somewhere as they are."""
        return self.form.base is None

    def chain(self) -> list[Chunk]:
        """Itself, the chunk that it is decoded against, and so on to one that is raw."""
        found = [self]
        while (base := found[-1].form.base) is not None:
            found.append(base)
        return found


def bytes_of(chain: list[tuple[Chunk, Form]], out: memoryview | None = None) -> memoryview:
    """The bytes of the first chunk of a chain, whose forms are pinned.

    Without `out`, those of a raw chunk are where they lie, read-only; all others come in memory of their own, checked.

    Raises:
        CorruptError: a delta does not lead to the bytes that it should.
    """
    (chunk, form), rest = chain[0], chain[1:]
    if form.base is None:
        raw = form.place.view.toreadonly()
        if out is None:
            return raw
        out[:] = raw
        return out
    base = bytes_of(rest)
    into = memoryview(bytearray(chunk.size)) if out is None else out
    try:
        decode(form.place.view, base, into, base_digest=form.base.digest)
    except CodecError as error:
        raise CorruptError(f"a reverse delta in {form.place.file.name} is bad: {error}") from error
    return into


def is_good(chain: list[tuple[Chunk, Form]]) -> bool:
    """Whether the bytes of the first chunk of a chain, whose forms are pinned, are what its digest says."""
    chunk = chain[0][0]
    try:
        return chunk_digest(bytes_of(chain)) == chunk.digest
    except CorruptError:
        return False
