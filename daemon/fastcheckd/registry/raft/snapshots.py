"""A voter's snapshot: the state after an entry of the log. Kept, sent and received in place of pysyncobj's serializer.

That one renames what it received before it is synced, so that a power cut leaves a voter with a name and nothing
behind it; believes whatever came; goes on as if nothing were when it cannot write; and reads files while it
sends. Here a snapshot is whole in memory, checked against its checksum, and durable before its name leads to it.

    snapshot  checksum, RaftSnapshot: the state, the entry that it is after and the one before, the voters at that point

Used in the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash
from google.protobuf.message import DecodeError
from pysyncobj.config import SERIALIZER_STATE

from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from ...log import Complaints
from ..model import State
from ..state import restore, snapshot
from .disk import Disk
from .journal import Entry
from .membership import Voters, voter_message, voter_of

logger = logging.getLogger(__name__)

SNAPSHOT = "snapshot"
FORMAT = 3
CHECKSUM_BYTES = 8
#: 4096 jobs, and as much again for what grows with their ranks.
SNAPSHOT_BYTES_MAX = 512 << 20
#: Sent at a time; a voter's messages are no larger than `transport` says.
PIECE_BYTES = 1 << 18
#: After one that could not be written.
PAUSE_S = 10.0

_complaints = Complaints(logger, "registry")


@dataclass(frozen=True)
class Snapshot:
    """What the log starts with.

    Attributes:
        last: newest entry in it.
        before: the one before that.
        state: what they have led to.
        voters: at that point.
    """

    last: Entry
    before: Entry
    state: State
    voters: Voters


def to_bytes(last: Entry, before: Entry, state: State, voters: Voters) -> bytes:
    """A snapshot as it is kept and sent: a message, and the checksum of its bytes before it."""
    body = log_pb2.RaftSnapshot(
        format=FORMAT,
        last=_entry_message(last),
        before=_entry_message(before),
        state=snapshot(state),
        voters=map(voter_message, voters.values()),
    ).SerializeToString(deterministic=True)
    return xxhash.xxh3_64_digest(body) + body


def from_bytes(data: bytes) -> Snapshot:
    """Inverse of `to_bytes`; raises ValueError when it is none or not what was written."""
    checksum, body = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if checksum != xxhash.xxh3_64_digest(body):
        raise ValueError("its checksum is that of other bytes, or missing")
    try:
        read = log_pb2.RaftSnapshot.FromString(body)
    except DecodeError as error:
        raise ValueError(f"it is no snapshot: {error}") from None
    if read.format != FORMAT:
        raise ValueError(f"it has format {read.format}, this version reads {FORMAT}")
    return Snapshot(
        _entry(read.last),
        _entry(read.before),
        restore(read.state),
        {record.raft_address: voter_of(record) for record in read.voters},
    )


def _entry_message(entry: Entry) -> log_pb2.RaftEntry:
    command, index, term = entry
    return log_pb2.RaftEntry(command=command, index=index, term=term)


def _entry(message: log_pb2.RaftEntry) -> Entry:
    return message.command, message.index, message.term


class Snapshots:
    """One voter's, with the methods (and method names) that pysyncobj calls on its serializer.

    Args:
        disk: where it lies.
        save: `keep`s the snapshot whose newest entry is the first, and the second the one before; raises OSError.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, disk: Disk, save: Callable[[Entry, Entry], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._disk = disk
        self._save = save
        self._clock = clock
        self._outcome: tuple[int, int] | None = None
        self._resting_until = float("-inf")
        #: What is sent to whom: the bytes, and how many of them have gone.
        self._sending: dict[Any, tuple[bytes, int]] = {}
        self._incoming: bytearray | None = None

    @property
    def resting(self) -> bool:
        """Whether one could not be written lately."""
        return self._clock() < self._resting_until

    def load(self) -> Snapshot | None:
        """The one on disk, if there is one; raises OSError or ValueError."""
        return from_bytes(self._disk.read(SNAPSHOT)) if self._disk.exists(SNAPSHOT) else None

    def keep(self, data: bytes) -> None:
        """Have one on disk in the place of the one before; raises OSError."""
        self._disk.replace(SNAPSHOT, data)
        self._sending.clear()

    def received(self, piece: Any) -> bytes | None:
        """All of the snapshot that the leader sends, with its last piece; None before that.

        Args:
            piece: bytes, whether they are the first, whether nothing follows.
        """
        if not isinstance(piece, tuple) or len(piece) != 3 or not isinstance(piece[0], bytes):
            return None  # the leader has none to send at this moment
        data, is_first, is_last = piece
        if is_first:
            self._incoming = bytearray()
        if self._incoming is None:
            return None  # its beginning went to an earlier life of this voter
        self._incoming += data
        if len(self._incoming) > SNAPSHOT_BYTES_MAX:
            _complaints.add("the leader's snapshot has more than %d bytes: not taken", SNAPSHOT_BYTES_MAX)
            self._incoming = None
            return None
        if not is_last:
            return None
        whole, self._incoming = bytes(self._incoming), None
        return whole

    # From here on: pysyncobj's interface, in its spelling.

    def serialize(self, data: tuple[Any, ...], id: int) -> None:
        """Write one; `data`: among others the newest entry in it and the one before."""
        try:
            self._save(data[1], data[2])
        except OSError as error:
            # The log stays as long as it is, and the snapshot before as it is.
            _complaints.add(
                "the registry snapshot %s cannot be written: %s; the log grows on",
                self._disk.path(SNAPSHOT),
                error.strerror or error,
            )
            self._resting_until = self._clock() + PAUSE_S
            self._outcome = SERIALIZER_STATE.FAILED, id
        else:
            self._outcome = SERIALIZER_STATE.SUCCESS, id

    def checkSerializing(self) -> tuple[int, int | None]:  # noqa: N802
        """What came of `serialize`, once."""
        outcome, self._outcome = self._outcome, None
        return outcome or (SERIALIZER_STATE.NOT_SERIALIZING, None)

    def getTransmissionData(self, transmissionID: Any) -> tuple[bytes, bool, bool] | None:  # noqa: N802, N803
        """The next piece for a voter; None: there is none to send."""
        if transmissionID not in self._sending:
            known = next((data for data, _ in self._sending.values()), None)
            try:
                self._sending[transmissionID] = known or self._disk.read(SNAPSHOT), 0
            except OSError as error:
                _complaints.add("the registry snapshot cannot be sent to another voter: %s", error)
                return None
        data, sent = self._sending[transmissionID]
        piece = data[sent : sent + PIECE_BYTES]
        is_last = sent + len(piece) == len(data)
        if is_last:
            del self._sending[transmissionID]
        else:
            self._sending[transmissionID] = data, sent + len(piece)
        return piece, sent == 0, is_last

    def cancelTransmisstion(self, id: Any) -> None:  # noqa: N802
        """A voter is gone."""
        self._sending.pop(id, None)
