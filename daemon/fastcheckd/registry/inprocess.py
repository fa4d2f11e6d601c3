"""The consensus engine of the simulation: Raft among voters of one process, its wire and its chances injected.

The promise of `raft.Raft` beside the real one: what is committed is never lost, a command is applied at most
once however often it was tried, a deposed leader goes on believing for a while, an unknown outcome may still
become a commit, and a voter that restarts has its log (`Disk`) and nothing else. Logs are never compacted;
instead a voter now and then goes on from what `state.snapshot` wrote, and starts from it.

It runs in the event loop that it is started in, by that loop's clock.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import TypeVar

from ..config import Config, Voter
from ..errors import InvalidRequestError, NoQuorumError
from .inprocess_wire import Append, Appended, Ask, Disk, Message, Vote, Wire
from .records import Json
from .state import apply, new_state, restore, snapshot

T = TypeVar("T")
__all__ = ["Disk", "InProcessRaft", "Message", "Wire"]

#: As `raft.Raft` sets pysyncobj.
APPEND_S = 0.1
ELECTION_S = (0.5, 0.9)
LEADER_FALLBACK_S = 1.0
ATTEMPT_S = 1.5
COMMAND_BYTES_MAX = 8 << 20
SNAPSHOT_ODDS = 0.01


class InProcessRaft:
    """One voter's part in the consensus.

    Args:
        config: with an `own_voter`.
        on_change: called in the loop after the state, the leader or this voter's role has changed; calls are merged.
        disk: what this voter wrote in its earlier lives.
        wire: the way to the others.
        rng: decides when to stand for election and when to take a snapshot.
        on_applied: sees every entry as it is applied: its number from 1, the command, the result, and the
            state after it.
        snapshot_odds: how often a voter goes on from a snapshot of itself, per entry applied.
    """

    def __init__(
        self,
        config: Config,
        on_change: Callable[[], None],
        *,
        disk: Disk,
        wire: Wire,
        rng: random.Random,
        on_applied: Callable[[int, Json, Json, Json], None] | None = None,
        snapshot_odds: float = SNAPSHOT_ODDS,
    ) -> None:
        voter = config.own_voter
        assert voter is not None, "the config names no voter of its own"
        self._voter = voter
        self._voters = {v.node_id: v for v in config.effective_voters}
        self._others = [v for v in sorted(self._voters) if v != voter.node_id]
        self._majority = len(self._voters) // 2 + 1
        self._on_change = on_change
        self._disk = disk
        self._wire = wire
        self._rng = rng
        self._on_applied = on_applied
        self._snapshot_odds = snapshot_odds
        disk.starts += 1
        self._client_id = f"{voter.node_id}-{disk.starts}"
        self._seq = 0
        self._state = restore(disk.snapshot) if disk.snapshot else new_state()
        self._applied = self._committed = disk.snapshot_index
        self._leads = False
        self._leader_id: str | None = None
        self._heard_at = 0.0
        self._patience_s = 0.0
        self._votes: set[str] = set()
        self._next: dict[str, int] = {}
        self._matched: dict[str, int] = {}
        self._answered_at: dict[str, float] = {}
        self._pending: dict[int, tuple[int, asyncio.Future[bytes | None]]] = {}
        self._seen: tuple[object, ...] = ()
        self._notified = False
        self._closed = False

    def start(self) -> None:
        """Take part, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._listen()
        self._tick()

    def close(self) -> None:
        """Take part no more."""
        self._closed = True

    # Callers

    @property
    def failure(self) -> str | None:
        """Nothing fails here."""
        return None

    @property
    def is_leader(self) -> bool:
        """Whether this voter believes to lead."""
        return self._leads

    @property
    def term(self) -> int:
        """Raft's term."""
        return self._disk.term

    @property
    def leader(self) -> Voter | None:
        """The leader as far as this voter has heard lately."""
        return None if self._leader_id is None else self._voters[self._leader_id]

    @property
    def voters(self) -> tuple[Voter, ...]:
        """All voters, this one included."""
        return tuple(self._voters.values())

    def read(self, reader: Callable[[Json], T]) -> T:
        """Call `reader` with the state as applied here."""
        return reader(self._state)

    async def propose(self, command: Json, *, timeout_s: float = 4.0) -> Json:
        """Commit a command and return the state machine's result.

        Raises:
            NoQuorumError: not committed in time, as far as is known; it may still be later.
            InvalidRequestError: the command is too large.
        """
        self._seq += 1
        data = json.dumps({**command, "client_id": self._client_id, "seq": self._seq}).encode()
        if len(data) > COMMAND_BYTES_MAX:
            raise InvalidRequestError(f"a command of {len(data)} bytes is too large for the registry")
        deadline = self._loop.time() + timeout_s
        while self._leads and (left_s := deadline - self._loop.time()) > 0:
            answer: asyncio.Future[bytes | None] = self._loop.create_future()
            self._disk.log.append((self._disk.term, data))
            self._pending[len(self._disk.log)] = (self._disk.term, answer)
            self._spread()
            try:
                async with asyncio.timeout(min(left_s, ATTEMPT_S)):
                    result = await answer
            except TimeoutError:
                continue
            if result is not None:
                return dict(json.loads(result))
        raise NoQuorumError(
            "the registry did not decide in time, or has another leader; trying again is safe"
        )

    # Time

    def _listen(self) -> None:
        self._heard_at = self._loop.time()
        self._patience_s = self._rng.uniform(*ELECTION_S)

    def _tick(self) -> None:
        if self._closed:
            return
        now = self._loop.time()
        if self._leads:
            fresh = sum(now - at < LEADER_FALLBACK_S for at in self._answered_at.values())
            if 1 + fresh < self._majority:
                self._follow(self._disk.term, None)
            else:
                self._spread()
        elif now - self._heard_at > self._patience_s:
            self._stand()
        self._loop.call_later(APPEND_S, self._tick)

    def _stand(self) -> None:
        """Ask for votes in a new term."""
        self._listen()
        self._disk.term += 1
        self._disk.voted_for = self._voter.node_id
        self._leader_id = None
        self._votes = {self._voter.node_id}
        log = self._disk.log
        ask = Ask(self._disk.term, self._voter.node_id, log[-1][0] if log else 0, len(log))
        for other in self._others:
            self._wire.send(self._voter.node_id, other, ask)
        self._count()
        self._changed()

    def _count(self) -> None:
        if len(self._votes) < self._majority:
            return
        now = self._loop.time()
        self._leads = True
        self._leader_id = self._voter.node_id
        self._next = dict.fromkeys(self._others, len(self._disk.log))
        self._matched = dict.fromkeys(self._others, 0)
        self._answered_at = dict.fromkeys(self._others, now)
        self._disk.log.append((self._disk.term, None))
        self._spread()
        self._changed()

    def _follow(self, term: int, leader: str | None) -> None:
        if term > self._disk.term:
            self._disk.term = term
            self._disk.voted_for = None
        self._leader_id = leader
        self._votes = set()
        if self._leads:
            self._leads = False
            self._listen()
            for _, future in self._pending.values():
                if not future.done():
                    future.set_result(None)
            self._pending.clear()
        self._changed()

    def _spread(self) -> None:
        """Send each of the others what it has not been sent yet, which also says that we lead."""
        log = self._disk.log
        for other in self._others:
            at = self._next[other]
            message = Append(
                self._disk.term,
                self._voter.node_id,
                at,
                log[at - 1][0] if at else 0,
                tuple(log[at:]),
                self._committed,
            )
            self._next[other] = len(log)
            self._wire.send(self._voter.node_id, other, message)
        self._advance()

    # Messages

    def receive(self, message: Message) -> None:
        """A message has come."""
        if self._closed:
            return
        if message.term > self._disk.term:
            self._follow(message.term, None)
        match message:
            case Ask():
                self._asked(message)
            case Vote():
                if message.granted and message.term == self._disk.term and not self._leads and self._votes:
                    self._votes.add(message.sender)
                    self._count()
            case Append():
                self._append(message)
            case Appended():
                self._appended(message)

    def _asked(self, ask: Ask) -> None:
        log = self._disk.log
        mine = (log[-1][0] if log else 0, len(log))
        granted = (
            ask.term == self._disk.term
            and self._disk.voted_for in (None, ask.sender)
            and (ask.last_term, ask.last_index) >= mine
        )
        if granted:
            self._disk.voted_for = ask.sender
            self._listen()
        self._wire.send(self._voter.node_id, ask.sender, Vote(self._disk.term, self._voter.node_id, granted))

    def _append(self, message: Append) -> None:
        me, term, log = self._voter.node_id, self._disk.term, self._disk.log
        if message.term < term:
            self._wire.send(me, message.sender, Appended(term, me, 0, False))
            return
        if self._leader_id != message.sender:
            self._follow(term, message.sender)
        self._listen()
        at = message.before_index
        if at > len(log) or (at and log[at - 1][0] != message.before_term):
            # Never below what is committed here: those entries the leader has too.
            self._wire.send(
                me, message.sender, Appended(term, me, max(min(at - 1, len(log)), self._applied), False)
            )
            return
        for number, entry in enumerate(message.entries, at):
            if number < len(log) and log[number][0] != entry[0]:
                assert number >= self._applied, "a committed entry would be overwritten"
                del log[number:]
            if number == len(log):
                log.append(entry)
        matched = at + len(message.entries)
        self._committed = max(self._committed, min(message.committed, matched))
        self._apply()
        self._wire.send(me, message.sender, Appended(term, me, matched, True))

    def _appended(self, message: Appended) -> None:
        if not self._leads or message.term < self._disk.term:
            return
        other = message.sender
        self._answered_at[other] = self._loop.time()
        if message.ok:
            self._matched[other] = max(self._matched[other], message.index)
            self._advance()
        else:
            self._next[other] = max(self._matched[other], min(message.index, len(self._disk.log)))

    def _advance(self) -> None:
        """Commit what a majority has, if it ends with an entry of this term."""
        log = self._disk.log
        index = sorted([len(log), *self._matched.values()])[-self._majority]
        if index > self._committed and log[index - 1][0] == self._disk.term:
            self._committed = index
            self._apply()

    # The state

    def _apply(self) -> None:
        while self._applied < self._committed:
            term, data = self._disk.log[self._applied]
            self._applied += 1
            if data is None:
                continue
            command = json.loads(data)
            result = apply(self._state, command)
            if self._on_applied is not None:
                self._on_applied(self._applied, command, result, self._state)
            proposed_in, future = self._pending.pop(self._applied, (0, None))
            if future is not None and not future.done():
                future.set_result(json.dumps(result).encode() if proposed_in == term else None)
            if self._rng.random() < self._snapshot_odds:
                self._disk.snapshot_index, self._disk.snapshot = self._applied, snapshot(self._state)
                self._state = restore(self._disk.snapshot)
        self._changed()

    def _changed(self) -> None:
        seen = (self._state["version"], self._leads, self._leader_id)
        if seen != self._seen and not self._notified:
            self._seen = seen
            self._notified = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._notified = False
        self._on_change()
