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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fastcheck_proto.v1 import common_pb2 as pb

from ..counters import Counters
from ..errors import NotHeldError, StoreError
from . import directory as files
from .chunk import Chunk, Form
from .manifests import ReplicaId, describe, encode, file_name, replica_id
from .replica import Replica
from .segment_pools import SegmentPools
from .slots import Place, SlotPool

logger = logging.getLogger(__name__)

Chain = list[tuple[Chunk, Form]]


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


@dataclass(eq=False)
class History:
    """The replicas of one shard here, and the chunks in slots that they share."""

    #: By step.
    replicas: dict[int, Replica] = field(default_factory=dict)
    #: Chunks of copies, by digest.
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    #: Drafts of it: they share its chunks.
    drafts: int = 0
    #: Rises whenever a manifest of it, written from what was true before, would be wrong.
    version: int = 0


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
        #: Guards all that follows, and the fields of chunks and places.
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

    def find(self, name: ReplicaId) -> Replica | None:
        """The entry of that name."""
        history = self.histories.get(HistoryId.of(name))
        return None if history is None else history.replicas.get(name.step)

    def current(self, replica: Replica) -> Replica | None:
        """The entry that a replica is or has become; None if it was dropped or replaced."""
        found = self.find(replica.id)
        return found if found is not None and found.content is replica.content else None

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """One reference more to each."""
        for chunk in chunks:
            chunk.references += 1

    def let_go(self, chunks: Iterable[Chunk], history: History) -> list[Place]:
        """One reference less to each; places that nobody refers to any more, to be freed without the lock."""
        freed: list[Place] = []
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

    def pin(self, chunk: Chunk) -> Chain:
        """The chunk's chain as it is now; its places stay until they are unpinned."""
        chain = [(link, link.form) for link in chunk.chain()]
        for _, form in chain:
            form.place.references += 1
        return chain

    def unpin(self, chain: Chain) -> list[Place]:
        """Undo `pin`; places to be freed without the lock."""
        return [place for _, form in chain for place in self._unplace(form.place)]

    @staticmethod
    def _unplace(place: Place) -> list[Place]:
        place.references -= 1
        return [] if place.references else [place]

    # --- without the lock ------------------------------------------------------------------------

    def free(self, places: Iterable[Place]) -> None:
        """Give the memory of places back that nobody refers to."""
        for place in places:
            if place.slot_bytes:
                self.slots.free(place)
                continue
            if place.bad:
                self.pools.condemn(place.file)
            self.pools.let_go(place.file)

    @contextlib.contextmanager
    def pinned(self, chunk: Chunk) -> Iterator[Chain]:
        """While inside, the bytes of a chunk, and of those that it is decoded against, stay where they are."""
        with self.changed:
            self.check_open()
            chain = self.pin(chunk)
        try:
            yield chain
        finally:
            with self.changed:
                freed = self.unpin(chain)
            self.free(freed)

    @contextlib.contextmanager
    def open(self, replica: Replica) -> Iterator[Replica]:
        """While inside, a replica's chunks stay, even when it is dropped or replaced; gives the newest entry of it.

        Raises:
            NotHeldError: it is not held any more.
        """
        with self.changed:
            self.check_open()
            now = self.current(replica)
            if now is None:
                raise NotHeldError(f"shard {tuple(replica.id)} is not held here any more")
            history = self.history(now.id)
            self.hold(now.content)
        try:
            yield now
        finally:
            with self.changed:
                freed = self.let_go(now.content, history)
            self.free(freed)

    def publish(self, replica: Replica) -> None:
        """Make a replica visible whose chunks are in place and held by the caller; it takes the place of an older one
        of that name.

        Raises:
            StoreFullError: no room for the manifest.
            StoreError: the file system refuses, or the store is closed.
        """
        while True:
            with self.changed:
                self.check_open()
                history = self.history(replica.id)
                version, forms = history.version, _forms(replica.content)
            with self._staged(replica, forms) as staged:
                self.faults("publish: staged")
                with self.changed:
                    self.check_open()
                    if history.version != version:
                        continue
                    self._rename(staged, replica.id)
                    self.faults("publish: renamed")
                    replaced = history.replicas.get(replica.id.step)
                    self.hold(replica.content)
                    history.replicas[replica.id.step] = replica
                    history.version += 1
                    freed = [] if replaced is None else self.let_go(replaced.content, history)
            self.free(freed)
            return

    def replace(self, name: ReplicaId, forms: Mapping[Chunk, Form]) -> None:
        """Give chunks of a history new forms. The new places hold no reference yet; the old ones are let go.

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
                wanted = {c: f for c, f in forms.items() if c.references and not _is_circle(c, f)}
                affected = [r for r in history.replicas.values() if _leads_to(r, wanted)]
                known = {r: _forms(r.content, wanted) for r in affected}
            with contextlib.ExitStack() as stack:
                staged = [(r, stack.enter_context(self._staged(r, known[r]))) for r in affected]
                self.faults("replace: staged")
                with self.changed:
                    self.check_open()
                    if history.version != version:
                        continue
                    freed = self._rename_all(history, staged, wanted)
                    unused = [form.place for chunk, form in forms.items() if chunk not in wanted]
                self.faults("replace: renamed")
            self.free(freed)
            for place in unused:
                self.slots.free(place)
            return

    def _rename_all(
        self, history: History, staged: Sequence[tuple[Replica, Path]], forms: Mapping[Chunk, Form]
    ) -> list[Place]:
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
        freed: list[Place] = []
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

    def drop(self, replica: Replica) -> bool:
        """Forget a replica; whether it was there still. Chunks that others need stay.

        Raises:
            StoreError: the file system refuses.
        """
        with self.changed:
            self.check_open()
            now = self.current(replica)
            if now is None:
                return False
            history = self.history(now.id)
            freed = self._strike(now, history)
        self.faults("drop: struck")
        self.free(freed)
        return True

    def _strike(self, replica: Replica, history: History) -> list[Place]:
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

    def forget_if_unused(self, name: ReplicaId) -> None:
        """With the lock held: a history without replicas and drafts is none."""
        history = self.histories.get(HistoryId.of(name))
        if history is not None and not history.replicas and not history.drafts:
            del self.histories[HistoryId.of(name)]

    def condemn(self, replica: Replica, chunk: Chunk, what: str) -> None:
        """Bytes of a chunk were found bad: drop all replicas that lead to it, counted; its memory is not used again."""
        with self.changed:
            history = self.histories.get(HistoryId.of(replica.id))
            if self.closed or history is None:
                return
            doomed = [r for r in history.replicas.values() if _leads_to(r, {chunk})]
            bad = chunk.form.place
            bad.bad = True
            freed: list[Place] = []
            for each in doomed:
                try:
                    freed += self._strike(each, history)
                except StoreError as error:
                    # It must not be served in any case; the next process finds it again, and then its bytes bad.
                    logger.error("%s", error)
                    history.replicas.pop(each.id.step, None)
            if history.chunks.get(chunk.digest) is chunk:
                del history.chunks[chunk.digest]  # a draft must not take it
        if not doomed:
            return
        self.free(freed)
        self.counters.add("corrupt_found", len(doomed))
        logger.error(
            "dropped shard %s: %s in %s at %d does not match its digest%s",
            tuple(replica.id), what, bad.file.name, bad.offset,
            f"; with it went {len(doomed) - 1} other steps" if len(doomed) > 1 else "",
        )  # fmt: skip
        if (listener := self.on_condemned) is not None:
            for each in doomed:
                listener(each)

    # --- manifests -------------------------------------------------------------------------------

    def rewrite(self, replica: Replica) -> None:
        """Write a manifest anew, of the same chunks: the time of its check has changed."""
        while True:
            with self.changed:
                self.check_open()
                found = self.find(replica.id)
                if found is None or found.content is not replica.content:
                    return
                history = self.history(replica.id)
                version, forms = history.version, _forms(replica.content)
            with self._staged(replica, forms) as staged, self.changed:
                if self.closed:
                    return
                if history.version != version:
                    continue
                self._rename(staged, replica.id)
                history.replicas[replica.id.step] = replica
                return

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
        data = encode(describe(replica.manifest, replica.content, replica.verified_at_ms, forms))
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


def _is_circle(chunk: Chunk, form: Form) -> bool:
    return form.base is not None and chunk in form.base.chain()
