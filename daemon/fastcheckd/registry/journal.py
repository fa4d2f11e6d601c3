"""The Raft log on disk: what a voter has acknowledged survives its crash, and the machine's.

Takes the place of pysyncobj's own journal, which syncs nothing, unpickles its metadata, and empties
the file before it writes it anew when it drops old entries: a crash in between loses acknowledged
entries. Here entries are appended with a checksum; `sync` is called before any message leaves the
voter (see `raft_transport`) and before an entry counts as committed; dropping old entries writes a new
file and renames it. Knows nothing of what the entries mean.

    log    magic, then per entry: bytes u32 · index u64 · term u64 · xxh3-64 of index+term+command · command
    meta   JSON: term and vote (synced at once), commit index (a hint, written once a second)
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, overload

import xxhash

from ..errors import ConfigError

Entry = tuple[bytes, int, int]

MAGIC = b"FCJRNL1\n"
_HEADER = struct.Struct("<IQQQ")


def _encode(command: bytes, index: int, term: int) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(struct.pack("<QQ", index, term) + command)
    return _HEADER.pack(len(command), index, term, checksum) + command


def _decode(data: bytes) -> tuple[list[Entry], int]:
    """All whole entries, and where the first broken one (or the end) is."""
    entries: list[Entry] = []
    at = len(MAGIC)
    while at + _HEADER.size <= len(data):
        size, index, term, checksum = _HEADER.unpack_from(data, at)
        command = data[at + _HEADER.size : at + _HEADER.size + size]
        intact = len(command) == size and checksum == xxhash.xxh3_64_intdigest(
            struct.pack("<QQ", index, term) + command
        )
        if not intact or (entries and index != entries[-1][1] + 1):
            break
        entries.append((command, index, term))
        at += _HEADER.size + size
    return entries, at


def sync_directory(folder: Path) -> None:
    """Make renames and new files in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_private(path: Path) -> IO[bytes]:
    """Open a file for writing, empty, that nobody else may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def write_file(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves either the old or the new content."""
    temporary = path.with_name(path.name + ".new")
    with open_private(temporary) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


class Journal:
    """The log of one voter, with the methods (and method names) that pysyncobj calls on its own.

    Args:
        path: the log; the metadata lies beside it in `<path>.meta`.
        base: first entry to keep, when a snapshot covers all before it. A log that does not contain it
            is older than the snapshot and is emptied.
        on_failure: told once, with the reason, when the log can no longer be trusted: after a failed sync
            nobody knows what is on disk. From then on every change raises.

    Raises:
        ConfigError: the log is broken in a place that this voter had acknowledged.
    """

    def __init__(
        self,
        path: Path,
        base: Entry | None = None,
        *,
        on_failure: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._path = path
        self._meta_path = path.with_name(path.name + ".meta")
        self._failed: OSError | None = None
        self._on_failure = on_failure
        if not path.exists():
            write_file(path, MAGIC)
        data = path.read_bytes()
        if not data.startswith(MAGIC):
            raise ConfigError(f"registry log {path} is not one of ours: {_ADVICE}")
        self._entries, end = _decode(data)
        self._meta: dict[str, Any] = self._read_meta()
        self._meta_saved = True
        self._file = path.open("r+b")
        # A torn tail was never acknowledged: `sync` had not returned.
        self._file.truncate(end)
        self._file.seek(end)
        self._dirty = True
        self.sync()
        if base is not None:
            self._align(base)
        last = self._entries[-1][1] if self._entries else (base[1] + 1 if base else 0)
        if self._meta["commit_index"] > max(last, 1):
            raise ConfigError(
                f"registry log {path} ends at entry {last}, but entry {self._meta['commit_index']} was "
                f"committed: {_ADVICE}"
            )

    def _read_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {"term": 0, "vote": None, "commit_index": 1}
        try:
            loaded = json.loads(self._meta_path.read_bytes())
            meta = {
                "term": int(loaded["term"]),
                "vote": loaded["vote"],
                "commit_index": int(loaded["commit_index"]),
            }
        except FileNotFoundError:
            if len(self._entries) > 1:
                raise ConfigError(
                    f"registry log {self._path} has lost its {self._meta_path.name}: {_ADVICE}"
                ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"registry file {self._meta_path} is broken ({error}): {_ADVICE}") from None
        return meta

    def _align(self, base: Entry) -> None:
        """Start at the snapshot, keeping what follows it: pysyncobj would drop that after a crash here."""
        offset = base[1] - self._entries[0][1] if self._entries else -1
        if 0 <= offset < len(self._entries) and self._entries[offset] == base:
            if offset:
                self.deleteEntriesTo(offset)
        else:
            self.clear()

    @property
    def size_bytes(self) -> int:
        """Size of the log."""
        return self._file.tell()

    def _fail(self, error: OSError) -> None:
        self._failed = error
        self._on_failure(f"the registry log {self._path} cannot be written: {error}")

    def sync(self) -> None:
        """Return when everything appended is on disk."""
        if self._failed is not None:
            raise self._failed
        if not self._dirty:
            return
        try:
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            self._fail(error)
            raise
        self._dirty = False

    # From here on: pysyncobj's interface, in its spelling.

    def add(self, command: bytes, idx: int, term: int) -> None:
        """Append an entry. On an error (a full disk) the log is as before."""
        if self._failed is not None:
            raise self._failed
        command = bytes(command)
        at = self._file.tell()
        try:
            self._file.write(_encode(command, idx, term))
            self._file.flush()
        except OSError as error:
            self._undo(at, error)
            raise
        self._entries.append((command, idx, term))
        self._dirty = True

    def _undo(self, at: int, cause: OSError) -> None:
        # The buffer that could not be flushed is dropped with the file object.
        try:
            os.truncate(self._path, at)
            file = self._path.open("r+b")
            file.seek(at)
        except OSError:
            self._fail(cause)
            return
        self._file, broken = file, self._file
        try:
            broken.close()
        except OSError:
            # Closing tried to flush the same bytes again: cut off whatever it managed to write.
            os.truncate(self._path, at)

    def clear(self) -> None:
        """Forget everything."""
        self._cut(len(MAGIC))
        self._entries = []

    def _cut(self, at: int) -> None:
        if self._failed is not None:
            raise self._failed
        self._file.flush()
        self._file.truncate(at)
        self._file.seek(at)
        self._dirty = True

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        """Forget the entries from a position on: another leader's log has others there."""
        gone = sum(_HEADER.size + len(command) for command, _, _ in self._entries[entryFrom:])
        self._cut(self._file.tell() - gone)
        del self._entries[entryFrom:]

    def deleteEntriesTo(self, entryTo: int) -> None:  # noqa: N802, N803
        """Forget the entries before a position: a snapshot holds their effect."""
        kept = self._entries[entryTo:]
        if self._failed is not None:
            raise self._failed
        # The snapshot that makes this right was renamed into this folder: first that, then this.
        sync_directory(self._path.parent)
        write_file(self._path, MAGIC + b"".join(_encode(*entry) for entry in kept))
        self._file.close()
        self._file = self._path.open("r+b")
        self._file.seek(0, os.SEEK_END)
        self._entries = kept
        self._dirty = False

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
        write_file(self._meta_path, json.dumps(self._meta).encode())
        self._meta_saved = True

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Write the commit index if it has moved."""
        if not self._meta_saved:
            self._save_meta()

    def _destroy(self) -> None:
        if self._failed is None:
            self.onOneSecondTimer()
            self.sync()
        self._file.close()


_ADVICE = (
    "this voter must not go on as if it had never voted. If other voters are healthy, move the log away and "
    "restart fastcheckd: the node goes on without a vote, until it gets a new raft_address, with: fastcheck voters "
    "replace NODE NODE"
)
