"""Changes of who votes, made by the leader: one server at a time, each looked at until it is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ...config import Voter
from ...errors import InvalidRequestError, NoQuorumError, RegistryError, UnsafeError
from .engine import Engine
from .membership import Change, Voters, enough_without

#: One attempt; beyond it the outcome is unknown, and it is looked at again.
ATTEMPT_S = 1.5
#: Voters that have answered within it are there; they are asked ten times a second.
HEALTHY_S = 1.0
#: Pause between looks at a change of the membership, and between attempts.
CHANGE_PAUSE_S = 0.05


class MembershipChanger:
    """The changes of one voter's engine, one at a time. Used in the callers' loop.

    Args:
        own: this voter.
        committed: the voters by what is committed.
        answer_to: makes a callback for the engine that completes a future in the callers' loop.
    """

    def __init__(
        self,
        own: Voter,
        engine: Engine,
        *,
        committed: Callable[[], Voters],
        is_leader: Callable[[], bool],
        answer_to: Callable[[asyncio.Future[Any]], Callable[[bytes | None, int], None]],
    ) -> None:
        self._own = own
        self._engine = engine
        self._committed = committed
        self._is_leader = is_leader
        self._answer_to = answer_to
        self._changing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    async def replace(self, old: Voter, new: Voter, *, timeout_s: float) -> None:
        """Have `new` vote in the place of `old`, for good; at the leader. Repeating it completes it.

        `old` is removed, then `new` added and waited for until it has all that is committed.

        Raises:
            UnsafeError: without `old` there is no majority that could go on.
            NoQuorumError: not done in time, or by another leader.
            RegistryError: another replacement is under way here.
            InvalidRequestError: this voter itself was to go.
        """
        if old.raft_address == self._own.raft_address:
            raise InvalidRequestError(
                f"the voter {old.node_id} leads and cannot replace itself; stop it first"
            )
        if self._changing.locked():
            raise RegistryError("another voter is being replaced; try again when that is done")
        async with self._changing:
            deadline = self._loop.time() + timeout_s
            await self._change(Change("rem", old), old, new, deadline)
            await self._change(Change("add", new), old, new, deadline)
            await self._until_caught_up(new, deadline)

    async def add(self, new: Voter, *, timeout_s: float) -> None:
        """Have `new` vote as well; at the leader. Repeating it completes it.

        Raises:
            UnsafeError: with one more that has nothing yet there would be no majority.
            NoQuorumError: not done in time, or by another leader.
            RegistryError: another change of the voters is under way here.
        """
        if self._changing.locked():
            raise RegistryError("another change of the voters is under way; try again when that is done")
        async with self._changing:
            deadline = self._loop.time() + timeout_s
            await self._change(Change("add", new), None, new, deadline)
            await self._until_caught_up(new, deadline)

    async def _until_caught_up(self, new: Voter, deadline: float) -> None:
        while not self._engine.has_caught_up(new):
            if not self._is_leader() or self._loop.time() > deadline:
                raise NoQuorumError(
                    f"the new voter {new.node_id} at {new.raft_address} is added, but has not caught up yet; "
                    "see whether its registry process runs and can be reached, then repeat the command"
                )
            await asyncio.sleep(CHANGE_PAUSE_S)

    async def _change(self, change: Change, old: Voter | None, new: Voter, deadline: float) -> None:
        address = change.voter.raft_address
        while (address in self._committed()) != (change.kind == "add"):
            if not self._is_leader():
                raise NoQuorumError("the registry has another leader now; repeat the command")
            if self._loop.time() > deadline:
                raise NoQuorumError("the change of voters was not committed in time; repeat the command")
            voters = {voter.raft_address: voter for voter in self._engine.voters}
            if not enough_without(voters, old, new, self._engine.healthy(HEALTHY_S)):
                what = "with one more" if old is None else f"without {old.node_id}"
                raise UnsafeError(
                    f"{what} too few of the voters {', '.join(v.node_id for v in voters.values())} are healthy to go "
                    "on; bring another one back first"
                )
            if (address in voters) != (change.kind == "add"):
                answer: asyncio.Future[Any] = self._loop.create_future()
                self._engine.change(change, self._answer_to(answer))
                try:
                    async with asyncio.timeout(ATTEMPT_S):
                        # Refused while another change is on its way: looked at again like any other outcome.
                        await answer
                except TimeoutError:
                    continue
            await asyncio.sleep(CHANGE_PAUSE_S)
