"""The Raft log on disk: what a voter has acknowledged survives its crash, and the machine's.

Takes the place of pysyncobj's own journal, which syncs nothing, unpickles its metadata, and empties
the file before it writes it anew when it drops old entries: a crash in between loses acknowledged
entries. Here entries are appended with a checksum; `sync` is called before any message leaves the
voter (see `transport`) and before an entry counts as committed; dropping old entries writes a new
file and renames it. Knows nothing of what the entries mean.

    log       magic, then per entry: bytes u32 · index u64 · term u64 · synced u64 · checksum u64 · command
    log.meta  JSON, sealed: term and vote (synced at once), commit index (a hint, written once a second)

The checksum is xxh3-64 of index, term, synced and command. `synced` is the newest entry that was on disk when this one
was written: it tells a tail that was torn before it was synced, which nobody counts on, from an entry that was
acknowledged and is broken now. The first is cut off; with the second this voter doesn't start, and changes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import xxhash

from ...errors import ConfigError
from .disk import FULL, Disk, from_checked_json, to_checked_json

Entry = tuple[bytes, int, int]

LOG = "log"
META = "log.meta"
#: The digit is the format's version.
MAGIC = b"FCJRNL2\n"
_MAGIC_OF_ANY = b"FCJRNL"
_HEADER = struct.Struct("<IQQQQ")
_CHECKED = struct.Struct("<QQQ")
#: Behind a broken entry whole ones are looked for so often: what broke it hit one place.
_BEHIND_MAX = 1000


def encode(entry: Entry, synced: int) -> bytes:
    """An entry as a record; `synced`: the newest entry that is on disk."""
    command, index, term = entry
    return _HEADER.pack(len(command), index, term, synced, _checksum(index, term, synced, command)) + command


def decode(data: bytes, at: int) -> tuple[Entry, int] | None:
    """The whole record at a place, and what was synced before it; None: there is none."""
    if at < 0 or at + _HEADER.size > len(data):
        return None
    size, index, term, synced, checksum = _HEADER.unpack_from(data, at)
    begin = at + _HEADER.size
    if begin + size > len(data):
        return None
    command = data[begin : begin + size]
    if checksum != _checksum(index, term, synced, command):
        return None
    return (command, index, term), synced


def decode_all(data: bytes) -> tuple[list[Entry], int]:
    """All whole entries of a log, and where the first broken one (or the end) is."""
    entries: list[Entry] = []
    at = len(MAGIC)
    while (found := decode(data, at)) is not None:
        entry = found[0]
        if entries and entry[1] != entries[-1][1] + 1:
            break
        entries.append(entry)
        at += _bytes_of(entry)
    return entries, at


def acknowledged_behind(data: bytes, at: int, index: int) -> int | None:
    """The newest entry that was on disk, going by what lies behind a broken one; None: nothing says so.

    Args:
        at: where the broken record begins.
        index: of the entry that it was.
    """
    later, place = index + 1, at
    for _ in range(_BEHIND_MAX):
        # An index stands behind the size in a record.
        place = data.find(struct.pack("<Q", later), place + 1)
        if place < 0:
            later, place = later + 1, at
            continue
        begin = place - 4
        while (found := decode(data, begin)) is not None and found[0][1] == later:
            entry, synced = found
            if synced >= index:
                return synced
            begin += _bytes_of(entry)
            later, at = later + 1, begin
    return None


def _bytes_of(entry: Entry) -> int:
    return _HEADER.size + len(entry[0])


def _checksum(index: int, term: int, synced: int, command: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_CHECKED.pack(index, term, synced) + command)


class Journal:
    """The log of one voter, with the methods (and method names) that pysyncobj calls on its own.

    An error of the disk ends it: then nobody knows what is written, or there is no room to write more. From then on
    every change raises, so that this voter acknowledges nothing and leads no more.

    Args:
        disk: where the log and its metadata lie.
        base: the two entries that the log has to begin with, when a snapshot covers all before them. A log that
            doesn't contain the first is older than the snapshot and is begun anew.
        on_failure: told once, with the reason, when the log can no longer be written.

    Raises:
        ConfigError: the log is broken in a place that this voter had acknowledged. No file was changed.
    """

    def __init__(
        self,
        disk: Disk,
        base: tuple[Entry, Entry] | None = None,
        *,
        on_failure: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._disk = disk
        self._path = disk.path(LOG)
        self._failed: OSError | None = None
        self._on_failure = on_failure
        if not disk.exists(LOG):
            disk.replace(LOG, MAGIC)
        data = disk.read(LOG)
        if not data.startswith(MAGIC):
            version = data[len(_MAGIC_OF_ANY) : len(MAGIC)].decode(errors="replace").strip()
            what = (
                f"has format {version!r}, this version reads 2"
                if data.startswith(_MAGIC_OF_ANY)
                else "is not one of ours"
            )
            raise ConfigError(f"registry log {self._path} {what}: {ADVICE}")
        self._entries, end = decode_all(data)
        self._meta: dict[str, Any] = self._read_meta()
        self._meta_saved = True
        self._check(data, end, base)
        self.size_bytes = len(data)
        self._dirty = True
        with self._writing():
            if end < len(data):
                # A torn tail was never acknowledged: `sync` had not returned.
                self._cut(end)
            self._synced = 0
            self.sync()
            if base is not None:
                self._align(base)

    def _check(self, data: bytes, end: int, base: tuple[Entry, Entry] | None) -> None:
        """Raise ConfigError, before anything is changed, when something that was acknowledged is not there."""
        last = self._entries[-1][1] if self._entries else 0
        if end < len(data) and (
            (known := acknowledged_behind(data, end, last + 1)) is not None
            # Of an empty beginning nobody knows the index.
            or (not self._entries and self._meta["commit_index"] > 1)
        ):
            until = f"; entries up to {known} lie behind it" if known else ""
            raise ConfigError(
                f"registry log {self._path} is broken at byte {end}, in entry {last + 1}, which this voter had "
                f"acknowledged{until}. Nothing was changed. {ADVICE}"
            )
        if base is not None and self._entries and self._entries[0][1] > base[0][1]:
            raise ConfigError(
                f"registry log {self._path} begins with entry {self._entries[0][1]}, and the snapshot ends with "
                f"{base[1][1]}: it is an older one. Nothing was changed. {ADVICE}"
            )
        covered = max(last, base[1][1] if base is not None else 0)
        if self._meta["commit_index"] > max(covered, 1):
            raise ConfigError(
                f"registry log {self._path} ends at entry {covered}, but entry {self._meta['commit_index']} was "
                f"committed. Nothing was changed. {ADVICE}"
            )

    def _read_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {"term": 0, "vote": None, "commit_index": 1}
        path = self._disk.path(META)
        try:
            loaded = from_checked_json(self._disk.read(META))
            meta = {
                "term": int(loaded["term"]),
                "vote": loaded["vote"],
                "commit_index": int(loaded["commit_index"]),
            }
        except FileNotFoundError:
            if len(self._entries) > 1:
                raise ConfigError(f"registry log {self._path} has lost its {META}: {ADVICE}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"registry file {path} is broken ({error}): {ADVICE}") from None
        return meta

    def _align(self, base: tuple[Entry, Entry]) -> None:
        """Start at the snapshot, keeping what follows it: pysyncobj would drop that after a crash here."""
        before, last = base
        offset = before[1] - self._entries[0][1] if self._entries else -1
        if offset >= 0 and self._entries[offset : offset + 2] == [before, last]:
            if offset:
                self.deleteEntriesTo(offset)
        else:
            self.begin_with(before, last)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except OSError as error:
            if self._failed is None:
                self._failed = error
                advice = "free some space there" if error.errno in FULL else "look at the disk"
                self._on_failure(
                    f"the registry log {self._path} cannot be written: {error.strerror or error}. The other voters "
                    f"go on; {advice}, and this one takes part again"
                )
            raise

    def sync(self) -> None:
        """Return when everything appended is on disk."""
        if self._failed is not None:
            raise self._failed
        if self._dirty:
            with self._writing():
                self._disk.sync(LOG)
            self._dirty = False
            self._synced = self._entries[-1][1] if self._entries else 0

    def begin_with(self, before: Entry, last: Entry) -> None:
        """Forget everything: a snapshot has come that ends with these two entries."""
        self._write([before, last])

    def _write(self, entries: list[Entry]) -> None:
        """Replace all of the log."""
        newest = entries[-1][1] if entries else 0
        data = MAGIC + b"".join(encode(entry, newest) for entry in entries)
        with self._writing():
            self._disk.replace(LOG, data)
        self._entries, self.size_bytes = entries, len(data)
        self._synced, self._dirty = newest, False

    # From here on: pysyncobj's interface, in its spelling.

    def add(self, command: bytes, idx: int, term: int) -> None:
        """Append an entry."""
        entry = bytes(command), idx, term
        record = encode(entry, self._synced)
        with self._writing():
            self._disk.append(LOG, record)
        self._entries.append(entry)
        self.size_bytes += len(record)
        self._dirty = True

    def _cut(self, size: int) -> None:
        self._disk.truncate(LOG, size)
        # At once: what comes next must not lie in front of what is cut off here.
        self._disk.sync(LOG)
        self.size_bytes = size

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        """Forget the entries from a position on: another leader's log has others there."""
        kept = self._entries[:entryFrom]
        gone = sum(map(_bytes_of, self._entries[entryFrom:]))
        with self._writing():
            self._cut(self.size_bytes - gone)
        self._entries = kept
        self._synced, self._dirty = kept[-1][1] if kept else 0, False

    def deleteEntriesTo(self, entryTo: int) -> None:  # noqa: N802, N803
        """Forget the entries before a position: a snapshot, which is on disk, holds their effect."""
        self._write(self._entries[entryTo:])

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        """Remember how far the cluster has committed; called before those entries take effect here."""
        self.sync()
        if raftCommitIndex != self._meta["commit_index"]:
            self._meta["commit_index"] = raftCommitIndex
            self._meta_saved = False

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        """Last known commit index, at most a second old."""
        return int(self._meta["commit_index"])

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:  # noqa: N802, N803
        """Make term and vote durable: a voter that forgets them may vote twice."""
        self._meta["term"] = term
        self._meta["vote"] = votedForNodeId
        self._save_meta()

    def getCurrentTerm(self) -> int:  # noqa: N802
        """Newest term that this voter has seen."""
        return int(self._meta["term"])

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        """Whom this voter gave its vote in that term."""
        vote = self._meta["vote"]
        return None if vote is None else str(vote)

    def _save_meta(self) -> None:
        with self._writing():
            self._disk.replace(META, to_checked_json(self._meta))
        self._meta_saved = True

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Write the commit index if it has moved."""
        if not self._meta_saved:
            self._save_meta()

    def _destroy(self) -> None:
        if self._failed is None:
            self.onOneSecondTimer()
            self.sync()
        self._disk.close()


ADVICE = (
    "This voter must not go on as if it had never voted. If the other voters are healthy, move the log away and "
    "restart fastcheckd: the node goes on without a vote, until it gets a new raft_address, with: fastcheck voters "
    "replace NODE NODE"
)
