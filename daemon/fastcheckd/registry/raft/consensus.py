"""What everything in the registry needs of its consensus engine, whichever that is.

`raft.Raft` is pysyncobj behind this, in the daemon and in the simulation. Nothing else in the daemon may depend
on more than this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from ...config import Voter
from ..model import State

T = TypeVar("T")


class Consensus(Protocol):
    """One voter's part in the consensus."""

    @property
    def failure(self) -> str | None:
        """Why this voter can take no part any more; it has to be restarted."""

    @property
    def is_leader(self) -> bool:
        """Whether this voter believes to lead: a reason to try, never a proof."""

    @property
    def term(self) -> int:
        """Raft's term: one leader each, at most."""

    @property
    def leader(self) -> Voter | None:
        """The leader as far as this voter has heard lately."""

    @property
    def voters(self) -> tuple[Voter, ...]:
        """All voters, this one included."""

    def read(self, reader: Callable[[State], T]) -> T:
        """Call `reader` with the state as applied here. It must be quick and keep nothing of it."""

    async def propose(
        self, command: log_pb2.RegistryCommand, *, timeout_s: float = 4.0
    ) -> log_pb2.RegistryResult:
        """Commit a command, at most once however often it is tried, and return the state machine's result.

        Raises:
            NoQuorumError: not committed in time, as far as is known; it may still be later.
            InvalidRequestError: the command is too large.
        """

    async def add_member(self, new: Voter, *, timeout_s: float) -> None:
        """Have `new` vote as well; repeating it completes it."""

    async def replace_member(self, old: Voter, new: Voter, *, timeout_s: float) -> None:
        """Have `new` vote in the place of `old`; repeating it completes it."""

    def start(self) -> None:
        """Join the other voters."""

    def close(self) -> None:
        """Leave them; returns when the log is closed."""
