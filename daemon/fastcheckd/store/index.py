"""What a store holds, in its index and on disk: both say the same at any moment that the lock is free.

A manifest is renamed into place, or unlinked, in the same critical section as its entry. Memory is let go only after
no manifest names it any more. A chunk may change its form (raw bytes, or a delta against a newer chunk): then all
manifests that lead to it are written anew, and renamed one after the other; between two renames both forms are good.

The replicas of one shard of one rank and kind are its *history*. Chunks are shared within a history and nowhere else.

Lock order: `changed`, then the pools'. No file is written, nothing is hashed, decoded, copied or unmapped under it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fastcheck_proto.v1 import common_pb2 as pb

from ..counters import Counters
from ..errors import CorruptError, NotHeldError, StoreError
from . import directory as files
from .chunk import Chain, Chunk, Form, Link, bytes_of, first_bad
from .manifests import ReplicaId, describe, encode, file_name, replica_id
from .replica import History, HistoryId, Listing, Replica
from .segment_pools import SegmentPools
from .slots import Slot, SlotPool

logger = logging.getLogger(__name__)


class Index:
    """Replicas, chunks and manifests of one store. Where it says so, the caller holds `changed`."""

    def __init__(
        self,
        folder: Path,
        pools: SegmentPools,
        slots: SlotPool,
        counters: Counters,
        now_ms: Callable[[], int],
    ) -> None:
        self.folder = folder
        self.pools = pools
        self.slots = slots
        self.counters = counters
        self.now_ms = now_ms
        #: Guards all that follows, and the fields of replicas, chunks and places.
        self.changed = threading.Lock()
        self.histories: dict[HistoryId, History] = {}
        self.closed = False
        #: Is told of what was dropped because it was bad, outside the lock.
        self.on_condemned: Callable[[Replica], None] | None = None
        #: Fault points: called with a name between any two steps that change something on disk.
        self.faults: Callable[[str], None] = lambda _: None

    # --- with the lock held ----------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise StoreError on a closed store."""
        if self.closed:
            raise StoreError(f"the RAM store in {self.folder} is closed")

    def history(self, name: ReplicaId) -> History:
        """The history that a replica belongs to, made if need be."""
        return self.histories.setdefault(HistoryId.of(name), History())

    def forget_if_unused(self, name: ReplicaId) -> None:
        """Of a history that nobody needs nothing is kept."""
        history = self.histories.get(HistoryId.of(name))
        if history is not None and history.is_unused():
            del self.histories[HistoryId.of(name)]

    def find(self, name: ReplicaId) -> Replica | None:
        """The replica of that name."""
        history = self.histories.get(HistoryId.of(name))
        return None if history is None else history.replicas.get(name.step)

    def check_held(self, replica: Replica) -> None:
        """Raise NotHeldError if a replica was dropped or replaced, StoreError on a closed store."""
        self.check_open()
        if self.find(replica.id) is not replica:
            raise NotHeldError(f"shard {tuple(replica.id)} is not held here any more")

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """One reference more to each."""
        for chunk in chunks:
            chunk.references += 1

    def let_go(self, chunks: Iterable[Chunk], history: History) -> list[Slot]:
        """One reference less to each; places that nobody refers to any more, to be freed without the lock."""
        freed: list[Slot] = []
        for chunk in chunks:
            chunk.references -= 1
            # Without references its base loses one, too.
            link: Chunk | None = chunk
            while link is not None and not link.references:
                if history.chunks.get(link.digest) is link:
                    del history.chunks[link.digest]
                freed += self._unplace(link.form.place)
                base = link.form.base
                if base is not None:
                    base.references -= 1
                link = base
        return freed

    @staticmethod
    def _unplace(place: Slot) -> list[Slot]:
        place.references -= 1
        return [] if place.references else [place]

    # --- without the lock ------------------------------------------------------------------------

    def replicas_of(self, name: ReplicaId) -> list[Replica]:
        """All steps of the history that a replica belongs to, the newest first."""
        with self.changed:
            found = self.histories.get(HistoryId.of(name))
            replicas = [] if found is None else list(found.replicas.values())
        return sorted(replicas, key=lambda replica: -replica.id.step)

    def listings(self, name: ReplicaId) -> list[Listing]:
        """All that lists chunks of the history that a replica belongs to: replicas and drafts."""
        with self.changed:
            found = self.histories.get(HistoryId.of(name))
            return [] if found is None else [*found.replicas.values(), *found.drafts]

    def longest_chain(self, name: ReplicaId) -> int:
        """Through how many others a chunk of that history is decoded at most, as things stand."""
        chains = (len(chunk.chain()) for replica in self.replicas_of(name) for chunk in replica.content)
        return max(chains, default=1) - 1

    def free(self, places: Iterable[Slot]) -> None:
        """Give the memory of places back that nobody refers to."""
        for place in places:
            if place.slot_bytes:
                self.slots.free(place)
                continue
            if place.bad:
                self.pools.condemn(place.file)
            self.pools.let_go(place.file)

    @contextlib.contextmanager
    def pinned(self, chunk: Chunk, of: Replica | None = None) -> Iterator[Chain]:
        """While inside, the bytes of a chunk, and of those that it is decoded against, stay where they are.

        The caller holds the chunk, or says of which replica it is.

        Raises:
            NotHeldError: that one is not held any more.
        """
        with self.changed:
            self.check_open() if of is None else self.check_held(of)
            chain = [(link, link.form) for link in chunk.chain()]
            for _, form in chain:
                form.place.references += 1
        try:
            yield chain
        finally:
            with self.changed:
                freed = [place for _, form in chain for place in self._unplace(form.place)]
            self.free(freed)

    @contextlib.contextmanager
    def open(self, replica: Replica) -> Iterator[None]:
        """While inside, a replica's chunks stay, even when it is dropped or replaced.

        Raises:
            NotHeldError: it is not held any more.
        """
        with self.changed:
            self.check_held(replica)
            history = self.history(replica.id)
            self.hold(replica.content)
        try:
            yield
        finally:
            with self.changed:
                freed = self.let_go(replica.content, history)
            self.free(freed)

    @contextlib.contextmanager
    def bytes_of(self, replica: Replica, number: int) -> Iterator[memoryview]:
        """A chunk of an open replica, read-only: where it lies if it is raw, else decoded into memory of its own.

        Raises:
            CorruptError: it cannot be decoded; the replica was dropped, counted.
        """
        with self.pinned(replica.content[number]) as chain:
            try:
                view = bytes_of(chain)
            except CorruptError:
                self._condemn(chain, replica.id)
                raise
            yield view

    # --- publishing and dropping -----------------------------------------------------------------

    def publish(self, replica: Replica) -> None:
        """Make a replica visible whose chunks are in place and held by the caller; it takes the place of an older one
        of that name.

        Raises:
            StoreFullError: no room for the manifest.
            StoreError: the file system refuses, or the store is closed.
        """
        try:
            while not self._publish(replica):
                pass
        except BaseException:
            with self.changed:
                self.forget_if_unused(replica.id)
            raise

    def _publish(self, replica: Replica) -> bool:
        with self.changed:
            self.check_open()
            history = self.history(replica.id)
            version, forms = history.version, _forms(replica.content)
        with self._staged(replica, forms) as staged:
            self.faults("publish: staged")
            with self.changed:
                self.check_open()
                if self.history(replica.id) is not history or history.version != version:
                    return False
                self._rename(staged, replica.id)
                self.faults("publish: renamed")
                replaced = history.replicas.get(replica.id.step)
                self.hold(replica.content)
                history.replicas[replica.id.step] = replica
                history.version += 1
                freed = [] if replaced is None else self.let_go(replaced.content, history)
        self.free(freed)
        return True

    def drop(self, replica: Replica) -> bool:
        """Forget a replica; whether it was there still. Chunks that others need stay.

        Raises:
            StoreError: the file system refuses.
        """
        with self.changed:
            self.check_open()
            if self.find(replica.id) is not replica:
                return False
            freed = self._strike(replica, self.history(replica.id))
        self.faults("drop: struck")
        self.free(freed)
        return True

    def _strike(self, replica: Replica, history: History) -> list[Slot]:
        """With the lock held: remove manifest and entry."""
        path = self._path_of(replica.id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot drop {path}: {error.strerror}") from None
        del history.replicas[replica.id.step]
        history.version += 1
        freed = self.let_go(replica.content, history)
        self.forget_if_unused(replica.id)
        return freed

    def check(self, chunk: Chunk, name: ReplicaId, of: Replica | None = None) -> bool:
        """Compare a chunk of a history with its digest. If it is bad, all replicas that lead to what makes it so are
        dropped, counted, and that memory is not used again.

        The caller holds the chunk, or says of which replica it is; raises NotHeldError if that is not held any more.
        """
        with self.pinned(chunk, of) as chain:
            return not self._condemn(chain, name)

    def _condemn(self, chain: Chain, name: ReplicaId) -> bool:
        """The same of a chain that is pinned; whether it is bad."""
        found = first_bad(chain)
        if found is None:
            return False
        doomed, freed = self._strike_all(name, found)
        if not doomed:
            return True  # somebody else was faster
        self.free(freed)
        self.counters.add("corrupt_found", len(doomed))
        place = found[1].place
        for each in doomed:
            logger.error(
                "dropped shard %s: a chunk in %s at %d does not match its digest",
                tuple(each.id), place.file.name, place.offset,
            )  # fmt: skip
        if (listener := self.on_condemned) is not None:
            for each in doomed:
                listener(each)
        return True

    def _strike_all(self, name: ReplicaId, bad: Link) -> tuple[list[Replica], list[Slot]]:
        """Drop what leads to a bad chunk; returns it, and places to be freed."""
        chunk, form = bad
        freed: list[Slot] = []
        with self.changed:
            form.place.bad = True
            history = self.histories.get(HistoryId.of(name))
            if self.closed or history is None or chunk.form is not form:
                return [], []
            doomed = [r for r in history.replicas.values() if _leads_to(r, {chunk})]
            for each in doomed:
                try:
                    freed += self._strike(each, history)
                except StoreError as error:
                    # It must not be served in any case; the next process finds it again, and then its bytes bad.
                    logger.error("%s", error)
                    history.replicas.pop(each.id.step, None)
            if history.chunks.get(chunk.digest) is chunk:
                del history.chunks[chunk.digest]  # a draft must not take it
        return doomed, freed

    # --- changes of form -------------------------------------------------------------------------

    def replace(self, name: ReplicaId, forms: Mapping[Chunk, Form]) -> None:
        """Give chunks of a history new forms. New places hold no reference yet; the old ones are let go.

        A chunk that is not needed any more keeps its form, and its new place is freed. What leads in a circle is
        refused.

        Raises:
            StoreFullError, StoreError: nothing changed, and the new places are the caller's still.
        """
        while True:
            with self.changed:
                self.check_open()
                history = self.history(name)
                version = history.version
                wanted = _without_circles({c: f for c, f in forms.items() if c.references})
                affected = [r for r in history.replicas.values() if _leads_to(r, wanted)]
                known = {r: _forms(r.content, wanted) for r in affected}
            with contextlib.ExitStack() as stack:
                staged = [(r, stack.enter_context(self._staged(r, known[r]))) for r in affected]
                self.faults("replace: staged")
                with self.changed:
                    self.check_open()
                    if self.history(name) is not history or history.version != version:
                        continue
                    freed = self._rename_all(history, staged, wanted)
                    self.forget_if_unused(name)
                    unused = [f.place for c, f in forms.items() if c not in wanted and not f.place.references]
                self.faults("replace: renamed")
            self.free([*freed, *unused])
            return

    def _rename_all(
        self, history: History, staged: Sequence[tuple[Replica, Path]], forms: Mapping[Chunk, Form]
    ) -> list[Slot]:
        done = 0
        try:
            for replica, path in staged:
                self._rename(path, replica.id)
                done += 1
                self.faults("replace: one renamed")
        except StoreError as error:
            if not done:
                raise
            # Manifests that were not renamed lead to the old places: these stay, until the next process sorts it out.
            logger.error("a change of form is half on disk: %s", error)
            for chunk in forms:
                chunk.form.place.references += 1
        history.version += 1
        freed: list[Slot] = []
        for chunk, form in forms.items():
            old = chunk.form
            form.place.references += 1
            if form.base is not None:
                form.base.references += 1
            chunk.form = form
            freed += self._unplace(old.place)
            if old.base is not None:
                freed += self.let_go([old.base], history)
        return freed

    # --- manifests -------------------------------------------------------------------------------

    def note_checked(self, replica: Replica) -> None:
        """All bytes of a replica were compared with their digests just now and matched."""
        with self.changed:
            replica.verified_at_ms = self.now_ms()
            for chunk in replica.content:
                chunk.checked = True

    def rewrite(self, replica: Replica) -> None:
        """Write a manifest anew that does not name the forms of today.

        Raises:
            StoreFullError, StoreError: as `publish`.
        """
        with self._staged(replica, _forms(replica.content)) as staged:
            self._rename(staged, replica.id)

    def _path_of(self, name: ReplicaId) -> Path:
        return self.folder / "manifests" / name.job / file_name(name)

    def _rename(self, staged: Path, name: ReplicaId) -> None:
        path = self._path_of(name)
        try:
            staged.rename(path)
        except OSError as error:
            raise StoreError(f"cannot publish {path}: {error.strerror}") from None

    @contextlib.contextmanager
    def _staged(self, replica: Replica, forms: dict[Chunk, Form]) -> Iterator[Path]:
        """A manifest written in `tmp/`; removed at the end unless it was renamed into place."""
        data = encode(describe(replica.manifest, replica.content, forms))
        path = self.folder / "tmp" / f"{secrets.token_hex(16)}.replica"

        def write() -> None:
            files.own_folder(self.folder / "manifests" / replica.key.job)
            files.write_new(path, data)

        self.pools.with_room(f"write a manifest of {len(data)} bytes", write)
        try:
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108  the common case is that it was renamed


def id_of(manifest: pb.ShardManifest) -> ReplicaId:
    """What the replica of a manifest is filed under."""
    return replica_id(manifest.key, manifest.kind)


def _forms(content: Iterable[Chunk], changed: Mapping[Chunk, Form] | None = None) -> dict[Chunk, Form]:
    """The form of each chunk and of all that they are decoded against, as they are or would be."""
    found: dict[Chunk, Form] = {}
    for chunk in content:
        link: Chunk | None = chunk
        while link is not None and link not in found:
            form = found[link] = (changed or {}).get(link, link.form)
            link = form.base
    return found


def _leads_to(replica: Replica, chunks: Mapping[Chunk, Form] | set[Chunk]) -> bool:
    return any(link in chunks for chunk in replica.content for link in chunk.chain())


def _without_circles(forms: Mapping[Chunk, Form]) -> dict[Chunk, Form]:
    """The changes without those that would have a chunk lead to itself."""
    found: dict[Chunk, Form] = {}
    for chunk, form in forms.items():
        link = form.base
        while link is not None and link is not chunk:
            link = found.get(link, link.form).base
        if link is None:
            found[chunk] = form
    return found
