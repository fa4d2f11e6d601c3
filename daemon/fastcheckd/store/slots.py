"""Slots: where chunks of copies lie. A slot is a stretch of a slab, a file that stays mapped and warm.

A slab without a slot in use is a free file of the pools: it is taken again before a new one is made, and goes back to
the system when memory is short. Best fit, and neighbours that are free are one free stretch.

Slots of two kinds come from slabs of their own as long as there is room: chunks, which are of nearly one size, and
deltas and small chunks, which are of every size. A delta in the place of a chunk would leave a rest that
fits no other chunk.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from ..errors import OverBudgetError, StoreError, StoreFullError
from .segment_pools import SegmentPools
from .segments import PAGE_BYTES, SLAB_POOL, Segment, rounded

#: A slab has this share of the node's budget, within these bounds: few files, and none that is hard to give back.
SLAB_SHARE = 32
SLAB_BYTES_MIN = 1 << 20
#: Slabs for deltas are so many times smaller.
DELTA_SLABS = 8
SLAB_BYTES_MAX = 256 << 20
#: A chunk that is so many times smaller than the largest of its shard lies among the deltas.
SMALL_SHARE = 8
#: How often somebody who waits for a slot looks again whether the pools have memory.
_LOOK_S = 0.05


class Slot:
    """A stretch of a file that is in use. `references` belongs to the lock of whoever counts them (`Index`)."""

    __slots__ = ("bad", "file", "job", "length", "offset", "references", "slot_bytes")

    def __init__(self, file: Segment, offset: int, length: int, slot_bytes: int = 0, job: str = "") -> None:
        self.file = file
        self.offset = offset
        #: Bytes in it that count.
        self.length = length
        #: Size of the slot that it is, whole pages; 0: it lies in a segment.
        self.slot_bytes = slot_bytes
        #: Whose budget the slot counts for.
        self.job = job
        self.references = 0
        #: Wrong bytes were found there: its memory is not used again.
        self.bad = False

    @property
    def view(self) -> memoryview:
        """Its bytes, writable."""
        return self.file.view[self.offset : self.offset + self.length]


class _Slab:
    """The free stretches of one slab, by their first byte and by the byte behind them."""

    def __init__(self, file: Segment, number: int, *, deltas: bool) -> None:
        self.file = file
        self.number = number
        self.deltas = deltas
        self.used_bytes = 0
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}


def _delta_slot_bytes(length: int) -> int:
    """Size of a slot for a delta: eight for each power of two, so that the next step's fits where an older was."""
    quantum = max(PAGE_BYTES, 1 << max(0, length.bit_length() - 4))
    return -(-length // quantum) * quantum


class SlotPool:
    """All slots of a store. Thread-safe; memory of new slabs is allocated outside of its lock."""

    def __init__(self, pools: SegmentPools, budget_bytes: int) -> None:
        self._pools = pools
        self._slab_bytes = rounded(min(max(budget_bytes // SLAB_SHARE, SLAB_BYTES_MIN), SLAB_BYTES_MAX))
        self._changed = threading.Condition()
        #: Only one thread makes a slab at a time: others will find room in it.
        self._growing = threading.Lock()
        self._slabs: dict[str, _Slab] = {}
        #: Of slabs for chunks, and of those for deltas: free stretches as (length, slab's number, offset), rising.
        self._free: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
        self._by_number: dict[int, _Slab] = {}
        self._next_number = 0

    @property
    def free_bytes(self) -> int:
        """Of slabs that have slots in use, what is not in use."""
        with self._changed:
            return sum(length for free in self._free.values() for length, _, _ in free)

    def take(self, length: int, job: str, *, delta: bool = False, wait_s: float = 0.0) -> Slot:
        """A slot for so many bytes, a chunk's or a delta's, of undefined content; it counts for `job`.

        Raises:
            JobBudgetError: the job has as much as it may.
            OverBudgetError: no room, and for `wait_s` there was none.
            StoreFullError: the file system is full.
        """
        size = _delta_slot_bytes(length) if delta else rounded(length)
        self._pools.charge(job, size, wait_s=wait_s)
        try:
            slab, offset = self._find(size, delta, wait_s)
        except BaseException:
            self._pools.charge(job, -size)
            raise
        return Slot(slab.file, offset, length, size, job)

    def take_all(self, lengths: Sequence[int], job: str, *, wait_s: float = 0.0) -> list[Slot]:
        """Slots for the chunks of one step, all or none; raises as `take`.

        What fits no free stretch lies side by side in slabs made to measure, if it fills any: the next step of the
        shard is cut alike and takes them whole, and nothing is lost at their ends.
        """
        until_s = time.monotonic() + wait_s
        is_measured = sum(lengths) >= self._slab_bytes
        # One that stays because later steps have it, too, must not lie between others that go.
        small = max(lengths) // SMALL_SHARE if is_measured else 0
        large: Sequence[int] = [at for at, length in enumerate(lengths) if length >= small]
        places: dict[int, Slot] = {}

        def take(at: int, *, delta: bool) -> None:
            left_s = max(0.0, until_s - time.monotonic())
            places[at] = self.take(lengths[at], job, delta=delta, wait_s=left_s)

        try:
            while large:
                batch, large = self._batch(lengths, large)
                if is_measured:
                    self._make_room([lengths[at] for at in batch])
                for at in batch:
                    take(at, delta=False)
            for at in set(range(len(lengths))) - places.keys():
                take(at, delta=True)
        except BaseException:
            for place in places.values():
                self.free(place)
            self._give_back_untouched()
            raise
        return [places[at] for at in range(len(lengths))]

    def _batch(self, lengths: Sequence[int], numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """As many of these chunks as a slab holds, at least one; and the rest."""
        stop, total = 1, rounded(lengths[numbers[0]])
        while stop < len(numbers) and (total := total + rounded(lengths[numbers[stop]])) <= self._slab_bytes:
            stop += 1
        return numbers[:stop], numbers[stop:]

    def _make_room(self, lengths: Sequence[int]) -> None:
        """Have a slab for those of these chunks that fit nowhere, if there is memory for it."""
        with self._growing:
            with self._changed:
                found = [(size, self._fit(size, False)) for size in map(rounded, lengths)]
                for size, place in found:
                    if place is not None:
                        slab, offset = place
                        slab.used_bytes -= size
                        self._insert(slab, offset, size)
            lack = sum(size for size, place in found if place is None)
            if not lack:
                return
            with contextlib.suppress(OverBudgetError, StoreFullError):
                slab = self._enter(self._pools.allocate(lack, SLAB_POOL), deltas=False)
                with self._changed:
                    self._insert(slab, 0, slab.file.size_bytes)

    def _give_back_untouched(self) -> None:
        """Slabs that were made for a step that found no room after all. Not while one is being entered."""
        with self._growing, self._changed:
            untouched = [slab for slab in self._slabs.values() if not slab.used_bytes]
            for slab in untouched:
                self._forget(slab)
        for slab in untouched:
            self._pools.give_back(slab.file)

    def free(self, place: Slot) -> None:
        """Nobody refers to the slot any more. A bad one is not used again."""
        self._pools.charge(place.job, -place.slot_bytes)
        if place.bad:  # the node has lost it, not the job
            return
        with self._changed:
            slab = self._slabs.get(place.file.name)
            if slab is None:
                return  # the store was closed
            slab.used_bytes -= place.slot_bytes
            self._insert(slab, place.offset, place.slot_bytes)
            emptied = not slab.used_bytes and slab.starts == {0: slab.file.size_bytes}
            if emptied:
                self._forget(slab)
            self._changed.notify_all()
        if emptied:
            self._pools.give_back(slab.file)

    def adopt(self, file: Segment, places: Iterable[Slot]) -> None:
        """Enter a slab of an earlier process, of which these slots are in use; they do not overlap."""
        places = list(places)
        sizes = [place.slot_bytes for place in places]
        # Whichever kind its slots are of: chunks are large, and of nearly one size.
        slab = self._enter(file, deltas=min(sizes, default=0) < max(sizes, default=0) // 2)
        at = 0
        with self._changed:
            for place in sorted(places, key=lambda place: place.offset):
                self._pools.charge(place.job, place.slot_bytes, within=False)
                slab.used_bytes += place.slot_bytes
                if place.offset > at:
                    self._insert(slab, at, place.offset - at)
                at = place.offset + place.slot_bytes
            if at < file.size_bytes:
                self._insert(slab, at, file.size_bytes - at)

    def close(self) -> None:
        """Forget all: later `free`s do nothing."""
        with self._changed:
            self._slabs.clear()
            self._by_number.clear()
            for free in self._free.values():
                free.clear()

    def _find(self, size: int, delta: bool, wait_s: float) -> tuple[_Slab, int]:
        started_s = time.monotonic()
        while True:
            try:
                with self._growing:
                    with self._changed:
                        if (found := self._fit(size, delta)) is not None:
                            return found
                    return self._grow(size, delta)
            except OverBudgetError:
                with self._changed:
                    if (found := self._fit(size, not delta)) is not None:
                        return found
                left_s = started_s + wait_s - time.monotonic()
                if left_s <= 0:
                    raise
                with self._changed:
                    self._changed.wait(min(left_s, _LOOK_S))

    def _fit(self, size: int, delta: bool) -> tuple[_Slab, int] | None:
        """With the lock held: the smallest free stretch of a kind of slab that is large enough."""
        free = self._free[delta]
        at = bisect_left(free, (size, -1, -1))
        if at == len(free):
            return None
        length, number, offset = free[at]
        slab = self._by_number[number]
        self._remove(slab, offset, length)
        if length > size:
            self._insert(slab, offset + size, length - size)
        slab.used_bytes += size
        return slab, offset

    def _grow(self, size: int, delta: bool) -> tuple[_Slab, int]:
        """A slot in a slab that has none in use yet; where a whole one does not fit, in a smaller one."""
        # Whole chunks: what is left over at the end of a slab would fit none.
        # Deltas of a step come and go together: in smaller slabs they leave whole ones free.
        wanted = self._slab_bytes // DELTA_SLABS if delta else self._slab_bytes
        slab_bytes = max(1, wanted // size) * size
        while True:
            try:
                file = self._pools.allocate(slab_bytes, SLAB_POOL)
                break
            except OverBudgetError:
                if slab_bytes == size:
                    raise
                slab_bytes = max(size, slab_bytes // 4 // size * size)
        slab = self._enter(file, deltas=delta)
        with self._changed:
            slab.used_bytes = size
            if file.size_bytes > size:
                self._insert(slab, size, file.size_bytes - size)
        return slab, 0

    def _enter(self, file: Segment, *, deltas: bool) -> _Slab:
        with self._changed:
            if file.name in self._slabs:
                raise StoreError(f"slab {file.name} is known already")
            slab = _Slab(file, self._next_number, deltas=deltas)
            self._next_number += 1
            self._slabs[file.name] = self._by_number[slab.number] = slab
            return slab

    def _forget(self, slab: _Slab) -> None:
        for offset, length in slab.starts.items():
            self._free[slab.deltas].remove((length, slab.number, offset))
        del self._slabs[slab.file.name], self._by_number[slab.number]

    def _insert(self, slab: _Slab, offset: int, length: int) -> None:
        """A stretch is free; one with its neighbours."""
        if (before := slab.ends.get(offset)) is not None:
            length += offset - before
            self._remove(slab, before, offset - before)
            offset = before
        if (behind := slab.starts.get(offset + length)) is not None:
            self._remove(slab, offset + length, behind)
            length += behind
        slab.starts[offset], slab.ends[offset + length] = length, offset
        insort(self._free[slab.deltas], (length, slab.number, offset))

    def _remove(self, slab: _Slab, offset: int, length: int) -> None:
        del slab.starts[offset], slab.ends[offset + length]
        free = self._free[slab.deltas]
        at = bisect_left(free, (length, slab.number, offset))
        assert free[at] == (length, slab.number, offset)
        del free[at]
