"""What a process left that was killed while it changed a replica in place, made whole again.

The base's manifest names a way back from a step that does not exist: a patch was under way, or a
newest step was being dropped. Every chunk is then, by its digest, the older step's, the newer's, or
torn; a torn one has its whole content, of the one step or the other, in a slot. Nothing is written before
every chunk is understood, so a replica that cannot be repaired is left as it is, to be dropped.
Being killed meanwhile does no harm: the next process does the same again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..codec.decoder import read_header
from ..digests import chunk_digest
from ..errors import CodecError, CorruptError, StoreError
from .copying import copy_bytes
from .directory import open_regular
from .held import HeldShard
from .segments import SLOT_POOL, Segment, rounded
from .undo import Undo
from .way_back import WayBackFile


class Recovery:
    """One replica that has to become `base` again. First `mend`, then, when there is room for a slot, `finish`."""

    def __init__(self, base: HeldShard, way: WayBackFile) -> None:
        self.base = base
        self._undo = Undo(base, way)
        self._way = way
        self._to_undo: list[int] = []

    def mend(self, unnamed: list[Path]) -> None:
        """Read all chunks and give the torn ones their whole content; `unnamed`: segments that may be slots.

        Raises:
            CorruptError: a chunk belongs to neither step; nothing was written.
            StoreError: the system refuses.
        """
        mended: list[tuple[int, bytes]] = []
        for index in range(len(self.base.chunks)):
            chunk = self._undo.chunk(index)
            found = chunk_digest(chunk)
            if found == self.base.chunk_digest(index):
                continue
            record = self._way.read(index, len(chunk))
            if record is None:
                raise CorruptError(f"chunk {index} changed without a way back")
            try:
                header = read_header(record)
            except CodecError as error:
                raise CorruptError(f"the way back of chunk {index}: {error}") from error
            if header.digest != self.base.chunk_digest(index):
                raise CorruptError(f"the way back of chunk {index} leads to other bytes")
            self._to_undo.append(index)
            if header.needs_base and found != header.base_digest:
                whole = {self.base.chunk_digest(index), header.base_digest}
                mended.append((index, _find(unnamed, len(chunk), whole, index)))
        for index, content in mended:
            copy_bytes(self._undo.chunk(index), content)

    def finish(self, segments: Path) -> None:
        """Turn all chunks back.

        Raises:
            CorruptError: a way back does not lead to the base.
            StoreError: no room for a slot, or the system refuses.
        """
        if not self._to_undo:
            return
        size = rounded(self.base.chunks.longest)
        try:
            # Not from the pools: one slot more than the budget is better than a lost replica.
            slot = Segment.create(segments, size, SLOT_POOL)
        except OSError as error:
            raise StoreError(f"no room for a slot of {size} bytes: {error.strerror}") from None
        try:
            for index in self._to_undo:
                self._undo.put_back(index, slot.view)
        finally:
            slot.unlink()


def _find(unnamed: list[Path], size: int, digests: set[bytes], index: int) -> bytes:
    """The content of the first slot that has one of the digests; raises CorruptError."""
    for content in _contents(unnamed, size):
        if chunk_digest(content) in digests:
            return content
    raise CorruptError(f"chunk {index} is torn, and its bytes are in no slot")


def _contents(unnamed: list[Path], size: int) -> Iterator[bytes]:
    for path in unnamed:
        try:
            fd = open_regular(path)
        except CorruptError:
            continue  # a link, a folder: not ours
        try:
            content = os.pread(fd, size, 0)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None
        finally:
            os.close(fd)
        if len(content) == size:
            yield content
