"""What a store holds, in its index and on disk: both say the same at any moment that the lock is free.

A manifest is renamed into place, or unlinked, in the same critical section as its entry; memory is
let go only after no manifest names it any more. One newest step's bytes and the older steps that
are had from them by ways back are a *chain*: only its head refers to the segment, each older one
to its way-back file, and the head stays as long as an older one needs it.

While a segment's bytes are being changed (a patch, a roll back) it is entered in `changes`: whoever
wants to read waits until that is over, see `pinned`.

Lock order: `changed`, then the pools'. No file is written and nothing is hashed, decoded or copied
under either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from fastcheck_proto.v1 import store_pb2

from ..counters import Counters
from ..errors import NotHeldError, StoreError
from . import directory as files
from .held import HeldShard
from .manifests import SCHEMA, ReplicaId, encode, file_name
from .segment_pools import SegmentPools
from .segments import PooledFile, Segment

logger = logging.getLogger(__name__)

#: Longest wait for a patch to be taken back, or for readers to let go, before the caller is refused.
CHANGE_WAIT_S = 10.0


class Change(Protocol):
    """Somebody is changing the bytes of a held shard's segment."""

    #: Whose bytes they were, and will be again if the change fails.
    base: HeldShard
    #: What the base's manifest on disk names as its newer step, and does not exist yet.
    target: ReplicaId | None

    def blocks(self, shard: HeldShard) -> bool:
        """Whether a shard of the chain must not be dropped meanwhile."""

    def want(self) -> None:
        """See to it that the change ends soon. Returns at once; not to be called under a lock."""

    def freeze(self) -> None:
        """Return when no byte is changed any more, and none will be: the store is closing."""


class Books:
    """Index, manifests and memory of one store. Where it says so, the caller holds `changed`."""

    def __init__(
        self, folder: Path, pools: SegmentPools, counters: Counters, now_ms: Callable[[], int]
    ) -> None:
        self.folder = folder
        self.pools = pools
        self.counters = counters
        self.now_ms = now_ms
        #: Guards all that follows; notified when a change ends and when a reader lets go.
        self.changed = threading.Condition(threading.Lock())
        self.shards: dict[ReplicaId, HeldShard] = {}
        #: Dropped, and kept only because an older step is had through them. After a restart they are
        #: held like others, until they are dropped again.
        self.hidden: set[ReplicaId] = set()
        self.changes: dict[Segment, Change] = {}
        self.closed = False
        #: Is told of what was dropped because it was bad, outside the lock.
        self.on_condemned: Callable[[HeldShard], None] | None = None

    # --- with the lock held ----------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise StoreError on a closed store."""
        if self.closed:
            raise StoreError(f"the RAM store in {self.folder} is closed")

    def current(self, shard: HeldShard) -> HeldShard | None:
        """The entry that `shard` is or has become; None if it was dropped or replaced."""
        found = self.shards.get(shard.id)
        if found is None or found.manifest is not shard.manifest or found.id in self.hidden:
            return None
        return found

    def older_than(self, shard: HeldShard) -> HeldShard | None:
        """The step whose way back starts from this one, hidden or not."""
        newer = shard.id
        for name, other in self.shards.items():
            if (
                other.way_back is not None
                and other.way_back.from_step == newer.step
                and name._replace(step=newer.step) == newer
            ):
                return other
        return None

    def all_older_than(self, shard: HeldShard) -> list[HeldShard]:
        """Everything that is had from this one's bytes, the next older first."""
        found = []
        older = self.older_than(shard)
        while older is not None:
            found.append(older)
            older = self.older_than(older)
        return found

    def path_to_head(self, shard: HeldShard) -> list[HeldShard]:
        """The shard, the step that it starts from, and so on to the one whose bytes are here."""
        path = [shard]
        while path[-1].way_back is not None:
            path.append(self.shards[self._newer_id(path[-1])])
        return path

    def path_of(self, name: ReplicaId) -> Path:
        """Where a shard's manifest is."""
        return self.folder / "manifests" / name.job / file_name(name)

    def place(self, staged: Path, shard: HeldShard) -> None:
        """Rename a staged manifest into place and enter the shard; raises StoreError, then nothing changed."""
        try:
            staged.rename(self.path_of(shard.id))
        except OSError as error:
            raise StoreError(f"cannot publish {self.path_of(shard.id)}: {error.strerror}") from None
        self.shards[shard.id] = shard
        self.hidden.discard(shard.id)

    def strike(self, shard: HeldShard) -> None:
        """Remove manifest and entry; its memory is not let go. Nothing may need it any more."""
        try:
            self.path_of(shard.id).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot drop {self.path_of(shard.id)}: {error.strerror}") from None
        del self.shards[shard.id]
        self.hidden.discard(shard.id)

    def strike_unneeded(self, shard: HeldShard) -> list[PooledFile]:
        """After a shard went: strike the hidden ones that were kept for it. Returns what to let go."""
        freed: list[PooledFile] = []
        while shard.way_back is not None:
            newer = self.shards.get(self._newer_id(shard))
            if newer is None or newer.id not in self.hidden or self.older_than(newer) is not None:
                break
            self.strike(newer)
            freed.append(memory_of(newer))
            shard = newer
        return freed

    def change_blocking(self, shard: HeldShard) -> Change | None:
        """The change that has to end before the shard may be dropped."""
        change = self.changes.get(shard.segment)
        return change if change is not None and change.blocks(shard) else None

    def change_towards(self, name: ReplicaId) -> Change | None:
        """The change that will publish this one."""
        return next((c for c in self.changes.values() if c.target == name), None)

    def end_change(self, change: Change) -> None:
        """The change is over, whatever its outcome."""
        if self.changes.get(change.base.segment) is change:
            del self.changes[change.base.segment]
        self.changed.notify_all()

    # --- without the lock ------------------------------------------------------------------------

    def let_go(self, memory: Sequence[PooledFile]) -> None:
        """Take away one reference each."""
        for file in memory:
            self.pools.let_go(file)

    def await_end(self, change: Change, deadline_s: float) -> None:
        """Ask a change to end and wait for it.

        Raises:
            NotHeldError: it has not ended by `deadline_s` (monotonic).
        """
        change.want()
        with self.changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self.changed.wait_for(
                lambda: self.changes.get(change.base.segment) is not change, timeout=left_s
            ):
                raise NotHeldError(
                    f"shard {tuple(change.base.id)} is being replaced by a newer step, which did not end in "
                    f"{CHANGE_WAIT_S:g} s: try again, or ask another holder"
                )

    @contextlib.contextmanager
    def pinned(self, shard: HeldShard) -> Iterator[list[HeldShard]]:
        """While inside, the bytes of a shard and all that it is had from stay where they are.

        A patch of them is ended first. Gives `path_to_head` of the entry that the shard is now. Not to be
        nested: whoever waits for the outer pin would keep the inner one waiting.

        Raises:
            NotHeldError: it is not held any more, or the patch did not end.
        """
        path = self._pin(shard)
        try:
            yield path
        finally:
            self.let_go([memory_of(link) for link in path])
            with self.changed:
                self.changed.notify_all()

    def _pin(self, shard: HeldShard) -> list[HeldShard]:
        deadline_s = time.monotonic() + CHANGE_WAIT_S
        while True:
            with self.changed:
                self.check_open()
                found = self.current(shard)
                if found is None:
                    raise NotHeldError(f"shard {tuple(shard.id)} is not held here any more")
                change = self.changes.get(found.segment)
                if change is None:
                    path = self.path_to_head(found)
                    for link in path:
                        self.pools.hold(memory_of(link))
                    return path
            self.await_end(change, deadline_s)

    def condemn(self, shard: HeldShard, what: str) -> None:
        """Drop a shard whose bytes were found bad, and the older steps that are had from it; each is counted.

        The memory is not used again. `what` says which part does not match its digest.
        """
        with self.changed:
            found = self.shards.get(shard.id)
            if self.closed or found is None or found.manifest is not shard.manifest:
                return
            # The oldest first: a process that ends here leaves no older step without its newer.
            doomed = [*reversed(self.all_older_than(found)), found]
            for each in doomed:
                try:
                    self.strike(each)
                except StoreError as error:
                    # It must not be served in any case; without its memory the next process drops it.
                    logger.error("%s", error)
                    del self.shards[each.id]
                    self.hidden.discard(each.id)
            freed = [memory_of(each) for each in doomed] + self.strike_unneeded(found)
        self.pools.condemn(memory_of(found))
        self.let_go(freed)
        self.counters.add("corrupt_found", len(doomed))
        logger.error(
            "dropped shard %s: %s in %s at %d does not match its digest%s",
            tuple(found.id), what, memory_of(found).name, found.offset,
            f"; with it went {len(doomed) - 1} older steps" if len(doomed) > 1 else "",
        )  # fmt: skip
        listener = self.on_condemned
        if listener is not None:
            for each in doomed:
                listener(each)

    @contextlib.contextmanager
    def staged(self, shard: HeldShard) -> Iterator[Path]:
        """A shard's manifest written in `tmp/`; removed at the end unless it was renamed into place."""
        stored = store_pb2.StoredShard(
            schema=SCHEMA,
            manifest=shard.manifest,
            segment=shard.segment.name,
            segment_offset=shard.offset,
            verified_at_ms=shard.verified_at_ms,
        )
        if shard.way_back is not None:
            stored.way_back.file = shard.way_back.file.name
            stored.way_back.from_step = shard.way_back.from_step
        data = encode(stored)
        path = self.folder / "tmp" / f"{secrets.token_hex(16)}.shard"
        with self.changed:
            self.check_open()

        def write() -> None:
            files.own_folder(self.folder / "manifests" / shard.key.job)
            files.write_new(path, data)

        self.pools.with_room(f"write a manifest of {len(data)} bytes", write)
        try:
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108  the common case is that it was renamed

    @staticmethod
    def _newer_id(shard: HeldShard) -> ReplicaId:
        assert shard.way_back is not None
        return shard.id._replace(step=shard.way_back.from_step)


def memory_of(shard: HeldShard) -> PooledFile:
    """What a held shard itself refers to: its segment, or its way-back file."""
    return shard.segment if shard.way_back is None else shard.way_back.file
