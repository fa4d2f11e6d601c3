"""Thinning: an older step whose own bytes go, because it can be had from those of the next one.

A patch changes bytes in place; here both steps have theirs, as an owner's have, and the older step's are let
go once its way back is complete. Nothing is changed before that: whatever ends it earlier, the process' death
included, leaves the older step as it was. So a thinning never has to be undone.
"""

from __future__ import annotations

import dataclasses
import logging
import threading

from ..errors import StoreError
from .books import Books, memory_of
from .held import HeldShard, WayBack
from .way_back import WayBackFile

logger = logging.getLogger(__name__)

#: A way back that takes more than this share of the step is not worth having instead of it.
WORTH = 0.9


class Thinning:
    """The way back to `older`, in the making. Thread-safe. Ends with `publish` or `abort`."""

    def __init__(self, books: Books, older: HeldShard) -> None:
        """For `RamStore.begin_thinning`."""
        self.older = older
        self._books = books
        self._lock = threading.Lock()
        self._way: WayBackFile | None = WayBackFile.make(
            books.folder / "ways", books.pools, len(older.chunks), older.key.job
        )
        self._added: set[int] = set()
        self._writers = 0

    def add(self, index: int, record: bytes) -> None:
        """What turns a chunk of the newer step into that of the older; once is enough. Never raises for want of room.

        Without room, or with too much to write, there is no thinning: the older step simply stays.
        """
        pools = self._books.pools
        with self._lock:
            way = self._way
            if way is None or index in self._added:
                return
            self._added.add(index)
            self._writers += 1
            pools.hold(way)  # so that nobody else gets the file while this writes
        start, stop = self.older.chunks.range(index)
        good = False
        try:
            way.append(pools, index, record, stop - start)
            good = way.written_bytes <= WORTH * self.older.manifest.bytes
        except StoreError as error:
            logger.info("shard %s stays as it is: %s", tuple(self.older.id), error)
        finally:
            with self._lock:
                self._writers -= 1
            if not good:
                self.abort()
            pools.let_go(way)

    def publish(self, step: int) -> bool:
        """Let the older step's bytes go, if all that differs in `step`, which is held here in full, has its way back.

        Returns whether that was done; otherwise everything is as before.

        Raises:
            StoreError: no room for the manifest, or the system refuses; everything is as before.
        """
        pools = self._books.pools
        with self._lock:
            way, self._way = self._way, None
            complete = self._writers == 0
        if way is None:
            return False
        done = False
        try:
            if complete:
                way.settle(pools)
                done = self._exchange(way, step)
        finally:
            if not done:
                pools.let_go(way)
        return done

    def abort(self) -> None:
        """The older step stays as it is. Harmless when repeated, or after `publish`."""
        with self._lock:
            way, self._way = self._way, None
        if way is not None:
            self._books.pools.let_go(way)

    def _exchange(self, way: WayBackFile, step: int) -> bool:
        books = self._books
        name = self.older.id._replace(step=step)
        with books.changed:
            books.check_open()
            older, newer = books.current(self.older), books.shards.get(name)
        if older is None or newer is None or not self._leads(older, newer):
            return False
        thin = dataclasses.replace(
            older, segment=newer.segment, offset=newer.offset, way_back=WayBack(way, step)
        )
        with books.staged(thin) as staged, books.changed:
            books.check_open()
            if books.current(older) is not older or books.shards.get(name) is not newer:
                return False
            changing = {older.segment, newer.segment} & books.changes.keys()
            if changing or newer.id in books.hidden or books.older_than(newer) is not None:
                return False
            hanging = books.all_older_than(older)
            books.place(staged, thin)
            # What was had from the older one's bytes goes on to be, from where those are had now.
            for each in hanging:
                books.shards[each.id] = dataclasses.replace(each, segment=newer.segment, offset=newer.offset)
        books.let_go([memory_of(older)])
        return True

    def _leads(self, older: HeldShard, newer: HeldShard) -> bool:
        """Whether each chunk that differs between the two has a record."""
        if not (older.is_full and newer.is_full and older.chunks == newer.chunks):
            return False
        return all(
            index in self._added or older.chunk_digest(index) == newer.chunk_digest(index)
            for index in range(len(older.chunks))
        )
