"""The log, its metadata and the snapshot, when everything stops at any one of their file operations.

The real journal works, and after each `sync` says what may be acknowledged. At its n-th file operation it is
stopped, for every n: before the operation, or halfway through a write. A process that is killed leaves the files
as they are then. A power cut leaves what was synced: contents as of the last sync of the file, names as of the
last sync of the folder. From either, a start must find every acknowledged entry, term and vote.
"""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import xxhash

from fastcheck_proto.v1.registry_log_pb2 import RaftSnapshot
from fastcheckd.config import Voter
from fastcheckd.registry.model import State
from fastcheckd.registry.raft import snapshots
from fastcheckd.registry.raft.disk import Disk
from fastcheckd.registry.raft.journal import Journal
from fastcheckd.registry.raft.snapshots import Snapshots
from fastcheckd.registry.raft.voter_folder import make_private

VOTER = Voter(node_id="a", registry_address="h:1", raft_address="h:2")


class Crash(BaseException):
    """The process is no more: nothing may catch this and go on."""


class CrashingDisk:
    """Counts the file operations below `folder`, stops at the chosen one, knows what was synced."""

    def __init__(self, folder, stop_at, torn):
        self.folder, self.stop_at, self.torn = folder, stop_at, torn
        self.count = 0
        self.contents = {}  # by inode
        self.names = {}

    def step(self):
        self.count += 1
        if self.count == self.stop_at:
            raise Crash

    def install(self, patch):
        """Put itself between the voter's files and the system."""
        opened, write = os.open, os.write

        def synced(real):
            def call(descriptor):
                self.step()
                real(descriptor)
                path = Path(f"/proc/self/fd/{descriptor}").readlink()
                if path.is_dir():
                    self.names = {p.name: p.stat().st_ino for p in path.iterdir()}
                else:
                    self.contents[path.stat().st_ino] = path.read_bytes()

            return call

        def counted(real):
            def call(*args):
                self.step()
                return real(*args)

            return call

        def fresh(path, flags, *mode):
            descriptor = opened(path, flags, *mode)
            if flags & os.O_TRUNC:
                self.contents.pop(os.fstat(descriptor).st_ino, None)  # the number of a file that is gone
            return descriptor

        def written(descriptor, data):
            try:
                self.step()
            except Crash:
                if self.torn:
                    write(descriptor, data[: len(data) // 2])
                raise
            return write(descriptor, data)

        patch.setattr(os, "fsync", synced(os.fsync))
        patch.setattr(os, "fdatasync", synced(os.fdatasync))
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(os, "ftruncate", counted(os.ftruncate))
        patch.setattr(os, "open", fresh)
        patch.setattr(os, "write", written)

    def after_power_cut(self, left):
        """A folder with what is on the disk then. A name without synced content: an empty file."""
        left.mkdir()
        for name, inode in self.names.items():
            (left / name).write_bytes(self.contents.get(inode, b""))
        return left


@dataclasses.dataclass
class Said:
    """What others were told last: they count on it."""

    entries: list
    term: int
    vote: str | None


def work(folder, said):
    """Three rounds of what a voter does with its files, each with a compaction."""
    disk = Disk(folder)
    kept = Snapshots(disk, lambda last, before: None)
    journal = Journal(disk)
    journal.setCurrentTerm(1, None)
    index = 0

    def say():
        journal.sync()
        said.append(Said(journal[:], journal.getCurrentTerm(), journal.getVotedForNodeId()))

    for round_number in range(1, 4):
        for _ in range(4):
            for _ in range(2):
                index += 1
                journal.add(b"command %d" % index, index, round_number)
            say()
        # A new leader has another last entry.
        journal.deleteEntriesFrom(len(journal) - 1)
        journal.setCurrentTerm(round_number + 1, "h:2")
        journal.add(b"instead %d" % index, index, round_number + 1)
        say()
        journal.setRaftCommitIndex(index)
        journal.onOneSecondTimer()
        # The state after the third entry from the end, as the engine stores it; then the log before is dropped.
        state = State()
        kept.keep(snapshots.to_bytes(journal[-3], journal[-4], state, {"h:2": VOTER}))
        journal.deleteEntriesTo(len(journal) - 4)
        say()
    # The leader sends its snapshot to a voter that was away: everything before is replaced by it.
    kept.keep(snapshots.to_bytes((b"far", 101, 9), (b"fa", 100, 9), state, {"h:2": VOTER}))
    journal.begin_with((b"fa", 100, 9), (b"far", 101, 9))
    say()
    journal._destroy()


def check(folder, said):
    """A voter starts from these files and has all that was acknowledged."""
    covered, base = 0, None
    disk = Disk(folder)
    if (found := Snapshots(disk, lambda last, before: None).load()) is not None:
        covered, base = found.last[1], (found.before, found.last)
        assert found.voters == {"h:2": VOTER}
    journal = Journal(disk, base)
    have = {index: (command, term) for command, index, term in journal[:]}
    for command, index, term in said.entries:
        # The last one may just have been cut for another leader's, which nobody has acknowledged yet.
        replaced = index == said.entries[-1][1] and have.get(index) != (command, term)
        assert index <= covered or replaced or have.get(index) == (command, term), f"entry {index} is lost"
    assert list(have) == list(range(min(have, default=0), min(have, default=0) + len(have))), "a gap"
    assert journal.getCurrentTerm() >= said.term
    if journal.getCurrentTerm() == said.term:
        assert journal.getVotedForNodeId() == said.vote
    # And it goes on.
    following = max(have, default=covered) + 1
    journal.setCurrentTerm(99, None)
    journal.add(b"next", following, 99)
    journal.sync()
    assert Journal(Disk(folder))[-1] == (b"next", following, 99)


def run(folder, stop_at, torn):
    """Work until the n-th operation; returns the disk and what was said, or None when it did not come to that."""
    state = folder / "state"
    make_private(state)
    disk, said = CrashingDisk(state, stop_at, torn), []
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        try:
            work(state, said)
        except Crash:
            return disk, said
    return None


@pytest.mark.parametrize("torn", [False, True])
def test_nothing_acknowledged_is_lost_wherever_it_stops(tmp_path, torn):
    stop_at = 0
    while True:
        stop_at += 1
        folder = tmp_path / str(stop_at)
        if (outcome := run(folder, stop_at, torn)) is None:
            break
        disk, said = outcome
        last = said[-1] if said else Said([], 0, None)
        left = disk.after_power_cut(folder / "left")
        if said:
            check(folder / "state", last)
            check(left, last)
        shutil.rmtree(folder)
    assert stop_at > 100, "every write, cut, sync and rename of it was one of the places"


def test_the_folder_and_its_files_are_nobody_elses(tmp_path):
    folder = tmp_path / "state"
    said = []
    (folder / "sub").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "log.meta.new").write_bytes(b"left by an older version")
    (folder / "log.meta.new").chmod(0o644)
    old = os.umask(0)
    try:
        make_private(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "log.meta.new").stat().st_mode & 0o777 == 0o600
        work(folder, said)
    finally:
        os.umask(old)
    files = [p for p in folder.iterdir() if p.is_file()]
    assert {"log", "log.meta", "snapshot"} <= {p.name for p in files}
    assert {p.name for p in files if p.stat().st_mode & 0o077} == set()


def test_a_snapshot_of_another_format_is_refused_with_both_versions():
    kept = snapshots.to_bytes((b"b", 2, 1), (b"a", 1, 1), State(), {"h:2": VOTER})
    assert snapshots.from_bytes(kept).last == (b"b", 2, 1)
    body = RaftSnapshot.FromString(kept[snapshots.CHECKSUM_BYTES :])
    body.format += 1
    newer = xxhash.xxh3_64_digest(body.SerializeToString()) + body.SerializeToString()
    with pytest.raises(ValueError, match="has format 4, this version reads 3"):
        snapshots.from_bytes(newer)
