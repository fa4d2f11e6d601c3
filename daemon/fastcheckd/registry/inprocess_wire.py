"""What voters of `inprocess` say to each other, and what each of them writes down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

#: Term and command; None is the entry by which a leader begins.
Entry: TypeAlias = tuple[int, bytes | None]


@dataclass
class Disk:
    """What survives a voter's process. The owner keeps it and gives it to the next `InProcessRaft`."""

    term: int = 0
    voted_for: str | None = None
    log: list[Entry] = field(default_factory=list)
    #: Entries in `snapshot`, and the state after them.
    snapshot_index: int = 0
    snapshot: bytes = b""
    starts: int = 0


@dataclass(frozen=True)
class Ask:
    """Vote for me."""

    term: int
    sender: str
    last_term: int
    last_index: int


@dataclass(frozen=True)
class Vote:
    """The answer to `Ask`."""

    term: int
    sender: str
    granted: bool


@dataclass(frozen=True)
class Append:
    """I lead; after this entry of yours come these."""

    term: int
    sender: str
    before_index: int
    before_term: int
    entries: tuple[Entry, ...]
    committed: int


@dataclass(frozen=True)
class Appended:
    """The answer to `Append`."""

    term: int
    sender: str
    #: Entries that match the leader's log; without `ok` as many as may be worth a try.
    index: int
    ok: bool


Message: TypeAlias = Ask | Vote | Append | Appended


class Wire(Protocol):
    """Carries messages between voters; may lose, delay, repeat and reorder them."""

    def send(self, sender: str, receiver: str, message: Message) -> None:
        """Bring a message to `receiver`'s `InProcessRaft.receive`, or not."""
