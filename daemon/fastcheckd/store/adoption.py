"""Taking over what an earlier process left in the RAM directory.

Believes nothing: every manifest is read within bounds, checked against its digest, its own name
and its segment; what does not hold up is unlinked, logged and counted. The bytes of segments are
not read here (that is a scrub's or a reader's work), so every adopted shard counts as not verified.
Only replicas that were being changed in place are read and made whole again, see `recovery`.

Runs once, under the directory's lock, before anybody else has the store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections import defaultdict
from pathlib import Path

from fastcheck_proto.v1 import store_pb2

from ..errors import CorruptError, StoreError
from .directory import discard, read_bounded, write_new
from .held import HeldShard, WayBack
from .manifests import MANIFEST_BYTES_MAX, SCHEMA, ReplicaId, decode, encode, file_name, replica_id
from .recovery import Recovery
from .segments import Segment, pool_of
from .way_back import WayBackFile

logger = logging.getLogger(__name__)


def adopt(ram_dir: Path) -> tuple[list[HeldShard], int]:
    """Read the directory; returns the shards that hold up and the number of manifests dropped.

    Afterwards the folders hold exactly these shards: other manifests, segments and ways back are unlinked.

    Raises:
        StoreError: the system refuses to read or remove something.
    """
    return _Adoption(ram_dir).run()


class _Adoption:
    def __init__(self, ram_dir: Path) -> None:
        self._manifests = ram_dir / "manifests"
        self._segments = ram_dir / "segments"
        self._ways = ram_dir / "ways"
        self._tmp = ram_dir / "tmp"
        self._dropped = 0
        #: Of shards that hold up.
        self._paths: dict[ReplicaId, Path] = {}
        self._shards: dict[ReplicaId, HeldShard] = {}
        self._recoveries: list[Recovery] = []
        self._used_ways: set[str] = set()

    def run(self) -> tuple[list[HeldShard], int]:
        whole: dict[str, list[tuple[Path, store_pb2.StoredShard]]] = defaultdict(list)
        older: list[tuple[Path, store_pb2.StoredShard]] = []
        for path, stored in self._read_all():
            if stored.HasField("way_back"):
                older.append((path, stored))
            else:
                whole[stored.segment].append((path, stored))
        for name, tenants in whole.items():
            self._adopt_segment(self._segments / name, tenants)
        # What an older one starts from comes before it: steps rise along a chain.
        older.sort(key=lambda entry: entry[1].manifest.key.step, reverse=True)
        taken = set(whole)
        for path, stored in older:
            try:
                self._adopt_older(path, stored, taken)
            except CorruptError as error:
                self._drop(path, str(error))
        self._mend()
        self._remove_unnamed(self._segments, {s.segment.name for s in self._shards.values()})
        self._finish()
        self._remove_unnamed(self._segments, {s.segment.name for s in self._shards.values()})
        self._remove_unnamed(
            self._ways, {s.way_back.file.name for s in self._shards.values() if s.way_back is not None}
        )
        for job in self._manifests.iterdir():
            if not any(job.iterdir()):
                job.rmdir()
        return list(self._shards.values()), self._dropped

    def _read_all(self) -> list[tuple[Path, store_pb2.StoredShard]]:
        """Every manifest that holds up by itself."""
        found = []
        for job in sorted(self._manifests.iterdir()):
            if job.is_symlink() or not job.is_dir():
                self._drop(job, "is not the folder of a job")
                continue
            for path in sorted(job.iterdir()):
                try:
                    found.append((path, _read(path)))
                except CorruptError as error:
                    self._drop(path, str(error))
        return found

    def _adopt_segment(self, path: Path, tenants: list[tuple[Path, store_pb2.StoredShard]]) -> None:
        """Enter the shards whose bytes one segment really holds."""
        pools = {pool_of(stored.manifest) for _, stored in tenants}
        try:
            segment = Segment.adopt(path, min(pools))
        except CorruptError as error:
            for manifest, _ in tenants:
                self._drop(manifest, str(error))
            return
        # Never made by us: then nobody knows who has it mapped, and nobody gets it next.
        segment.recyclable = len(pools) == 1
        for manifest, stored in tenants:
            if stored.segment_offset + stored.manifest.bytes > segment.size_bytes:
                self._drop(manifest, f"goes beyond the {segment.size_bytes} bytes of its segment")
            else:
                self._enter(manifest, HeldShard(stored.manifest, segment, stored.segment_offset, 0))

    def _adopt_older(self, path: Path, stored: store_pb2.StoredShard, taken: set[str]) -> None:
        """Enter a shard that has a way back; raises CorruptError.

        `taken`: names of the segments whose bytes belong to others.
        """
        name = replica_id(stored.manifest.key, stored.manifest.kind)
        if stored.way_back.file in self._used_ways:
            raise CorruptError("has the way back of another shard")
        way = WayBackFile.adopt(self._ways / stored.way_back.file)
        newer = self._shards.get(name._replace(step=stored.way_back.from_step))
        if newer is not None:
            # Where the newer one lies is what counts: it may have moved since this one was written.
            segment, offset = newer.segment, newer.offset
            shard = HeldShard(stored.manifest, segment, offset, 0, WayBack(way, stored.way_back.from_step))
            if shard.chunks != newer.chunks:
                raise CorruptError("has other chunks than the step that it starts from")
        else:
            if stored.segment in taken:
                raise CorruptError("the step that it starts from is not here")
            segment = Segment.adopt(self._segments / stored.segment, pool_of(stored.manifest))
            if stored.segment_offset + stored.manifest.bytes > segment.size_bytes:
                raise CorruptError(f"goes beyond the {segment.size_bytes} bytes of its segment")
            shard = HeldShard(stored.manifest, segment, stored.segment_offset, 0)
        if way.chunks != len(shard.chunks):
            raise CorruptError(f"has {len(shard.chunks)} chunks, its way back {way.chunks}")
        if newer is None:
            taken.add(stored.segment)
            self._recoveries.append(Recovery(shard, way))
        self._used_ways.add(way.name)
        self._enter(path, shard)

    def _mend(self) -> None:
        named = {s.segment.name for s in self._shards.values()}
        unnamed = [path for path in self._segments.iterdir() if path.name not in named]
        for recovery in list(self._recoveries):
            try:
                recovery.mend(unnamed)
            except CorruptError as error:
                self._recoveries.remove(recovery)
                self._drop_chain(recovery.base, str(error))

    def _finish(self) -> None:
        for recovery in self._recoveries:
            base = recovery.base
            try:
                recovery.finish(self._segments)
                self._write(base)
            except (StoreError, OSError) as error:
                self._drop_chain(base, f"a change of it was not finished and cannot be undone: {error}")
            else:
                logger.info("undid an unfinished change of shard %s", tuple(base.id))

    def _write(self, shard: HeldShard) -> None:
        """A manifest without a way back, in the place of the one that had it; raises OSError."""
        stored = store_pb2.StoredShard(
            schema=SCHEMA,
            manifest=shard.manifest,
            segment=shard.segment.name,
            segment_offset=shard.offset,
        )
        staged = self._tmp / f"{secrets.token_hex(16)}.shard"
        with contextlib.ExitStack() as stack:
            stack.callback(discard, staged)
            write_new(staged, encode(stored))
            staged.rename(self._paths[shard.id])

    def _enter(self, path: Path, shard: HeldShard) -> None:
        self._shards[shard.id] = shard
        self._paths[shard.id] = path

    def _drop_chain(self, shard: HeldShard, why: str) -> None:
        """Drop a shard and the older ones that depend on it, the oldest first."""
        doomed = [shard]
        for other in sorted(self._shards.values(), key=lambda s: s.key.step, reverse=True):
            if other.way_back is None:
                continue
            newer = other.id._replace(step=other.way_back.from_step)
            if any(newer == d.id for d in doomed):
                doomed.append(other)
        for each in reversed(doomed):
            self._drop(self._paths.pop(each.id), why)
            del self._shards[each.id]

    def _remove_unnamed(self, folder: Path, named: set[str]) -> None:
        for path in folder.iterdir():
            if path.name not in named:
                # Whose pages these were is not known any more, and a trainer may still write to them.
                discard(path)

    def _drop(self, path: Path, why: str) -> None:
        """Remove something that does not hold up, and count it."""
        logger.warning("dropped %r at start: %s", os.fspath(path), why)
        discard(path)
        self._dropped += 1


def _read(path: Path) -> store_pb2.StoredShard:
    """One manifest file, checked by itself; raises CorruptError."""
    stored = decode(read_bounded(path, MANIFEST_BYTES_MAX))
    key = stored.manifest.key
    if (path.parent.name, path.name) != (key.job, file_name(replica_id(key, stored.manifest.kind))):
        raise CorruptError("does not have the name that its content says")
    return stored
