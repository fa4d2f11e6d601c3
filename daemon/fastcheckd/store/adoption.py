"""Taking over what an earlier process left in the RAM directory.

Believes nothing: every manifest is read within bounds, checked against its digest, its own name, its files and all
other manifests; what does not hold up is unlinked, logged and counted. The bytes of chunks are not read here (that is
a scrub's or a reader's work) unless two manifests contradict each other, so every adopted replica counts as not
verified. Nothing is ever half changed, so nothing has to be repaired.

Runs once, under the directory's lock, before anybody else has the store.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import store_pb2

from ..codec.decoder import read_header
from ..digests import DIGEST_BYTES, chunk_digest
from ..errors import CodecError, CorruptError, StoreError
from .chunk import Chunk, Form
from .directory import discard, read_bounded
from .index import Index, id_of
from .manifests import CHAIN_MAX, MANIFEST_BYTES_MAX, ReplicaId, chunks_of, decode, file_name
from .replica import HistoryId, Replica
from .segments import PAGE_BYTES, SLAB_POOL, Segment, rounded, staging_pool
from .slots import Slot

logger = logging.getLogger(__name__)

#: What tells one chunk of a history from another: its digest, and where it lies if it is one of the owner's.
_Key = tuple[bytes, str, int]


class _Entry(NamedTuple):
    """One chunk as one manifest describes it."""

    key: _Key
    size: int
    file: str
    offset: int
    length: int
    base: _Key | None

    @property
    def stop(self) -> int:
        """First byte behind it."""
        return self.offset + self.length


@dataclass(eq=False)
class _Found:
    """One manifest that holds up by itself."""

    path: Path
    name: ReplicaId
    manifest: pb.ShardManifest
    #: The shard's own chunks, then those that they are decoded against.
    entries: list[_Entry]
    own: int


@dataclass
class _Chunks:
    """The chunks of one history."""

    forms: dict[_Key, _Entry] = field(default_factory=dict)
    made: dict[_Key, Chunk] = field(default_factory=dict)


def adopt(index: Index) -> None:
    """Enter what holds up of the index's directory; afterwards its folders hold exactly that.

    Raises:
        StoreError: the system refuses to read or remove something.
    """
    _Adoption(index).run()


class _Adoption:
    def __init__(self, index: Index) -> None:
        self._index = index
        self._manifests = index.folder / "manifests"
        self._segments = index.folder / "segments"
        self._dropped = 0
        self._files: dict[str, Segment] = {}

    def run(self) -> None:
        found = list(self._read_all())
        found = [each for each in found if self._has_its_files(each)]
        found = self._without_conflicts(found)
        stale = self._enter_all(found)
        for path in self._segments.iterdir():
            if path.name not in self._files:
                # Whose pages these were is not known any more, and a trainer may still write to them.
                discard(path)
        discard(self._index.folder / "ways")  # of the first design
        for replica in stale:
            self._rewrite(replica)
        for job in self._manifests.iterdir():
            if not any(job.iterdir()):
                job.rmdir()
        adopted = sum(len(history.replicas) for history in self._index.histories.values())
        self._index.counters.add("manifests_adopted", adopted)
        self._index.counters.add("manifests_dropped", self._dropped)

    # --- each manifest by itself -----------------------------------------------------------------

    def _read_all(self) -> Iterator[_Found]:
        for job in sorted(self._manifests.iterdir()):
            if job.is_symlink() or not job.is_dir():
                self._drop(job, "is not the folder of a job")
                continue
            for path in sorted(job.iterdir()):
                try:
                    yield _read(path)
                except CorruptError as error:
                    self._drop(path, str(error))

    def _has_its_files(self, found: _Found) -> bool:
        try:
            for entry in found.entries:
                size = self._file(entry.file, found).size_bytes
                slot = entry.file.endswith(".slab")
                stop = entry.offset + (rounded(entry.length) if slot else entry.length)
                if stop > size or (slot and entry.offset % PAGE_BYTES):
                    raise CorruptError(f"names bytes at {entry.offset} that no slot of {entry.file} has")
        except CorruptError as error:
            self._drop(found.path, str(error))
            return False
        return True

    def _file(self, name: str, found: _Found) -> Segment:
        if name not in self._files:
            pool = SLAB_POOL if name.endswith(".slab") else _pool_of(found.manifest)
            self._files[name] = Segment.adopt(self._segments / name, pool)
        return self._files[name]

    # --- all together ----------------------------------------------------------------------------

    def _without_conflicts(self, found: list[_Found]) -> list[_Found]:
        """Drop manifests that say that different chunks have the same bytes of a file, unless the bytes themselves say
        which of two is right."""
        claims: dict[str, list[tuple[_Entry, _Found]]] = defaultdict(list)
        for each in found:
            for entry in each.entries:
                claims[entry.file].append((entry, each))
        bad: dict[_Found, str] = {}
        for file, of_file in claims.items():
            of_file.sort(key=lambda claim: claim[0].offset)
            reach = of_file[0]
            for claim in of_file[1:]:
                if claim[0].offset < reach[0].stop and _what(claim) != _what(reach):
                    true = [self._is_there(entry) for entry, _ in (reach, claim)]
                    for (_, each), is_true in zip((reach, claim), true, strict=True):
                        if not is_true or all(true):
                            bad[each] = f"shares bytes of {file} at {claim[0].offset} with another chunk"
                    if true == [False, True]:
                        reach = claim
                reach = max(reach, claim, key=lambda each: each[0].stop)
        for each, why in bad.items():
            self._drop(each.path, why)
        return [each for each in found if each not in bad]

    def _is_there(self, entry: _Entry) -> bool:
        """Whether the bytes are those of the chunk."""
        with self._files[entry.file].view[entry.offset : entry.offset + entry.length] as view:
            if entry.base is None:
                return chunk_digest(view) == entry.key[0]
            try:
                header = read_header(view)
            except CodecError:
                return False
            return (header.digest, header.base_digest) == (entry.key[0], entry.base[0])

    def _enter_all(self, found: list[_Found]) -> list[Replica]:
        """Enter the replicas; those whose manifests name a form that another one has superseded are returned."""
        histories: dict[HistoryId, list[_Found]] = defaultdict(list)
        for each in found:
            histories[HistoryId.of(each.name)].append(each)
        stale: list[Replica] = []
        places: dict[str, list[Slot]] = defaultdict(list)
        for group in histories.values():
            group.sort(key=lambda each: -each.name.step)
            chunks = _chosen(group)
            for each in group:
                try:
                    replica = self._replica(each, chunks, places)
                except CorruptError as error:
                    self._drop(each.path, str(error))
                    continue
                self._index.history(each.name).replicas[each.name.step] = replica
                self._index.hold(replica.content)
                if any(chunks.forms[entry.key] != entry for entry in each.entries):
                    stale.append(replica)
            history = self._index.histories.get(HistoryId.of(group[0].name))
            if history is not None and group[0].name.kind == pb.REPLICA_KIND_COPY:
                history.chunks = {chunk.digest: chunk for chunk in chunks.made.values()}
        self._enter_files(found, places)
        return stale

    def _replica(self, found: _Found, chunks: _Chunks, places: dict[str, list[Slot]]) -> Replica:
        for entry in found.entries[: found.own]:
            _check_chain(entry.key, chunks)
        job = found.name.job

        def made(key: _Key) -> Chunk:
            if (known := chunks.made.get(key)) is not None:
                return known
            entry = chunks.forms[key]
            base = None if entry.base is None else made(entry.base)
            slot_bytes = rounded(entry.length) if entry.file.endswith(".slab") else 0
            place = Slot(self._files[entry.file], entry.offset, entry.length, slot_bytes, job)
            place.references = 1
            if base is not None:
                base.references += 1
            places[entry.file].append(place)
            chunk = chunks.made[key] = Chunk(key[0], entry.size, Form(place, base), checked=False)
            return chunk

        content = tuple(made(entry.key) for entry in found.entries[: found.own])
        return Replica(found.manifest, content, 0)

    def _enter_files(self, found: Iterable[_Found], places: dict[str, list[Slot]]) -> None:
        """Account for the files of the replicas that were entered; others are forgotten."""
        sessions: dict[str, set[str]] = defaultdict(set)
        jobs: dict[str, str] = {}
        for each in found:
            for entry in each.entries[: each.own]:
                sessions[entry.file].add(_pool_of(each.manifest))
            jobs.update({entry.file: each.name.job for entry in each.entries})
        self._files = {name: file for name, file in self._files.items() if places.get(name)}
        pools = self._index.pools
        for name, file in self._files.items():
            if name.endswith(".slab"):
                pools.adopt(file, "")
                pools.take_again(file)
                self._index.slots.adopt(file, places[name])
                continue
            pools.adopt(file, jobs[name])
            # Never made by us: then nobody knows who has it mapped, and nobody gets it next.
            file.recyclable = sessions[name] == {file.pool}
            for _ in places[name]:
                pools.hold(file)

    def _rewrite(self, replica: Replica) -> None:
        try:
            self._index.rewrite(replica)
        except StoreError as error:
            logger.warning("%s cannot be written anew and is dropped: %s", tuple(replica.id), error)
            self._index.drop(replica)
            self._dropped += 1

    def _drop(self, path: Path, why: str) -> None:
        """Remove something that does not hold up, and count it."""
        logger.warning("dropped %r at start: %s", os.fspath(path), why)
        discard(path)
        self._dropped += 1


def _read(path: Path) -> _Found:
    """One manifest file, checked by itself; raises CorruptError."""
    stored = decode(read_bounded(path, MANIFEST_BYTES_MAX))
    name = id_of(stored.manifest)
    if (path.parent.name, path.name) != (name.job, file_name(name)):
        raise CorruptError("does not have the name that its content says")
    return _Found(
        path, name, stored.manifest, _entries(stored), len(stored.manifest.chunk_digests) // DIGEST_BYTES
    )


def _what(claim: tuple[_Entry, _Found]) -> object:
    """What may be said of bytes by several manifests."""
    entry, found = claim
    return HistoryId.of(found.name), entry.key[0], entry.offset, entry.length, entry.base and entry.base[0]


def _pool_of(manifest: pb.ShardManifest) -> str:
    """The pool of an owner's segment: of the session that saved it. No other process ever copied into it."""
    return staging_pool(manifest.key.job, manifest.key.rank, manifest.session)


def _entries(stored: store_pb2.StoredReplica) -> list[_Entry]:
    owner = stored.manifest.kind == pb.REPLICA_KIND_OWNER
    chunks = chunks_of(stored)
    # Equal chunks of an owner lie where its trainer put each; those of copies are one.
    keys = [(chunk.digest, chunk.file, chunk.offset) if owner else (chunk.digest, "", 0) for chunk in chunks]
    return [
        _Entry(
            key, chunk.size, chunk.file, chunk.offset, chunk.length,
            None if chunk.base is None else keys[chunk.base],
        )
        for key, chunk in zip(keys, chunks, strict=True)
    ]  # fmt: skip


def _chosen(group: Iterable[_Found]) -> _Chunks:
    """One form of each chunk of a history: the raw one where there is one, else that of the newest step's manifest."""
    chunks = _Chunks()
    for found in group:
        for entry in found.entries:
            known = chunks.forms.get(entry.key)
            if known is None or (known.base is not None and entry.base is None):
                chunks.forms[entry.key] = entry
    return chunks


def _check_chain(key: _Key, chunks: _Chunks) -> None:
    for _ in range(CHAIN_MAX):
        base = chunks.forms[key].base
        if base is None:
            return
        if chunks.forms[base].size != chunks.forms[key].size:
            raise CorruptError("a chunk is decoded against one of another size")
        key = base
    raise CorruptError("a chunk is decoded through too many others, or through itself")
