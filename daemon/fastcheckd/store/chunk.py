"""A chunk: some bytes of a shard that never change, in one of two forms.

Raw: its bytes lie in a place. Delta: an encoded chunk lies there (docs/formats.md), and gives the bytes when it is
decoded against another chunk, its base. The form may change while the chunk is in use; the bytes that it stands for
are the same.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from ..codec.decoder import decode
from ..codec.format import Buffer
from ..digests import chunk_digest
from ..errors import CodecError, CorruptError
from .slots import Slot


class Form(NamedTuple):
    """Where a chunk's bytes are to be had."""

    place: Slot
    #: What the encoded chunk in `place` is decoded against; None: the bytes themselves lie there.
    base: Chunk | None = None


class Chunk:
    """Its fields belong to the lock of the index. Compared by identity."""

    __slots__ = ("checked", "digest", "form", "references", "size")

    def __init__(self, digest: bytes, size: int, form: Form, *, checked: bool = True) -> None:
        #: xxh3-128 of its bytes.
        self.digest = digest
        self.size = size
        self.form = form
        #: Whether this process has compared the bytes with the digest.
        self.checked = checked
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


#: A chunk with its form at one moment.
Link: TypeAlias = tuple[Chunk, Form]
#: A chunk and all that it is decoded against, the raw one last.
Chain: TypeAlias = list[Link]


def copy_bytes(into: memoryview, source: Buffer) -> None:
    """Copy `source` to `into`, which has its size and is writable, without the interpreter lock: a slice assignment
    of a chunk would stop every other thread.
    """
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def bytes_of(chain: Chain, out: memoryview | None = None) -> memoryview:
    """The bytes of the first chunk of a chain, whose forms are pinned.

    Without `out`, those of a raw chunk are where they lie, read-only; all others come in memory of their own. What
    was decoded has the chunk's digest; raw bytes are not checked.

    Raises:
        CorruptError: a delta does not lead to the bytes that it should.
    """
    (chunk, form), rest = chain[0], chain[1:]
    if form.base is None:
        raw = form.place.view.toreadonly()
        if out is None:
            return raw
        copy_bytes(out, raw)
        return out
    base = bytes_of(rest)
    into = np.empty(chunk.size, np.uint8).data if out is None else out
    try:
        decode(form.place.view, base, into, digest=chunk.digest, base_digest=form.base.digest)
    except CodecError as error:
        raise CorruptError(f"a reverse delta in {form.place.file.name} is bad: {error}") from error
    return into


def checked_bytes_of(chain: Chain, out: memoryview | None = None) -> memoryview:
    """As `bytes_of`, and raw bytes are checked as well.

    Raises:
        CorruptError: the bytes are not those that the digest says.
    """
    chunk, form = chain[0]
    found = bytes_of(chain, out)
    if form.base is None and chunk_digest(found) != chunk.digest:
        raise CorruptError(f"a chunk in {form.place.file.name} does not match its digest")
    return found


def first_bad(chain: Chain) -> Link | None:
    """The one of a chain that makes the first chunk's bytes wrong: itself, or one that it is decoded against."""
    if _is_good(chain):
        return None
    return next((chain[at] for at in reversed(range(1, len(chain))) if not _is_good(chain[at:])), chain[0])


def _is_good(chain: Chain) -> bool:
    try:
        checked_bytes_of(chain)
    except CorruptError:
        return False
    return True
