"""The consensus engine, pysyncobj, behind three things: propose a command, read the state, hear of change.

With `engine`, `transport` and `snapshots` all that knows pysyncobj; another engine would replace these. It
decides nothing: what a command does is in `state`. The engine ticks in a thread of its own, where the
state changes under a lock; callers live in one asyncio loop. What it stands on, clock and disk and thread, is
given (`EngineEnvironment`): the simulation has its own of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pysyncobj.journal
import pysyncobj.pickle
from pysyncobj import SyncObjConsumer, replicated
from pysyncobj.config import FAIL_REASON
from pysyncobj.syncobj import SyncObjException

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from ...config import Config, Voter
from ...durations import REGISTRY, Durations
from ...errors import ConfigError, InvalidRequestError, NoQuorumError, RegistryError
from ..model import State, refusal
from ..state import COMMAND_BYTES_MAX, apply
from . import messages, snapshots
from .engine import change_in
from .environment import EngineEnvironment, Ticking, engine_settings, port_taken
from .journal import ADVICE, LOG, Entry
from .membership import Change, Voters, voters_after
from .membership_changer import MembershipChanger
from .messages import Seal
from .snapshots import SNAPSHOT, Snapshot, Snapshots
from .tls import Tls

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The log is compacted when it is larger, not only when it has many entries.
LOG_BYTES_MAX = 64 << 20
COMPACTION_INTERVAL_S = 5.0
#: One attempt to commit; beyond it the outcome is unknown, and the same command is proposed again.
ATTEMPT_S = 1.5
PROPOSALS_MAX = 32

messages.install(pysyncobj.pickle, pysyncobj.journal)

_NOT_COMMITTED = {
    FAIL_REASON.QUEUE_FULL: "has too many commands queued",
    FAIL_REASON.MISSING_LEADER: "has no leader",
    FAIL_REASON.DISCARDED: "has a new leader",
    FAIL_REASON.NOT_LEADER: "has a new leader",
    FAIL_REASON.REQUEST_DENIED: "refused the command",
}


class _Machine(SyncObjConsumer):  # type: ignore[misc]  # pysyncobj has no types
    """The replicated state, as the engine sees it: one method from bytes to bytes that never raises."""

    def __init__(self) -> None:
        super().__init__()
        # Reentrant: a reader may ask something that reads.
        self.lock = threading.RLock()
        self.state = State()

    @replicated  # type: ignore[untyped-decorator]
    def apply(self, data: bytes) -> bytes:
        """Apply one command."""
        try:
            with self.lock:
                return apply(self.state, data).SerializeToString()
        except Exception as error:  # noqa: BLE001  raising here would wedge every voter for good
            return refusal(pb.ERROR_CODE_INTERNAL, repr(error)).SerializeToString()


class Raft:
    """This voter's part in the consensus.

    Args:
        config: with an `own_voter`.
        on_change: called in the loop after the state, the leader or this voter's role has changed,
            and after a failure. Calls are merged.
        durations: told how long each command took to be committed.

    Raises:
        ConfigError: a key, port or state directory that the operator has to look at.
    """

    def __init__(
        self,
        config: Config,
        on_change: Callable[[], None],
        *,
        durations: Durations | None = None,
        on_tick: Callable[[], None] = lambda: None,
        environment: EngineEnvironment | None = None,
    ) -> None:
        voter = config.own_voter
        if voter is None:
            raise ConfigError(
                f"config key 'voters' does not name this node, {config.node_id}: it runs no registry"
            )
        self._config = config
        self._voter = voter
        self._environment = environment or EngineEnvironment()
        #: Voters by what is committed, and by all that is in the log.
        self._committed: Voters = {v.raft_address: v for v in config.effective_voters}
        self._in_log = self._committed
        self._on_change = on_change
        self._on_tick = on_tick
        self._durations = durations or Durations(REGISTRY)
        self._machine = _Machine()
        self._folder = self._environment.folder(config, voter)
        self._snapshots = Snapshots(self._folder.disk, self._save_snapshot, self._environment.clock)
        self._joining = False
        self._client_id = self._environment.token()
        self._seq = 0
        self._slots = asyncio.Semaphore(PROPOSALS_MAX)
        self._seen: tuple[Any, ...] = ()
        self._notified = False
        self._compacted_at = float("-inf")
        #: Schema of the state that the snapshot on disk is in; 0: there is none.
        self._schema_on_disk = 0
        self._failure: str | None = None
        self._halted = threading.Event()
        self._ticking: Ticking | None = None

    def start(self) -> None:
        """Open the log and join the other voters. Call it inside the running loop.

        Raises:
            ConfigError: a key, port or state directory that the operator has to look at.
            RegistryError: the files cannot be written now; a later start may go better.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._folder.claim()
            try:
                self._folder.check_marker()
                self._join(self._folder.protection())
            except BaseException:
                self._folder.release()
                raise
        except OSError as error:
            raise RegistryError(
                f"the registry's files in {self._folder.path} cannot be used: {error}. This voter takes no part "
                "until they can; the others go on"
            ) from error

    def _join(self, protection: Seal | Tls) -> None:
        begins = self._open()
        self._joining = self._folder.joining
        self._folder.mark()
        if self._voter.raft_address not in self._in_log and not self._joining:
            raise ConfigError(
                f"this node's log says that it is no voter any more: {self._voter.raft_address} was replaced. "
                "To have it back, run on a healthy node: fastcheck voters replace OLD NEW"
            )
        self._environment.check_port(self._voter.raft_address, "raft_address")
        settings = engine_settings(
            self._voter.raft_address, alone=len(self._in_log) == 1, more=self._environment.settings
        )
        try:
            self._engine = self._environment.engine(
                self._voter,
                [v for v in self._in_log.values() if v.raft_address != self._voter.raft_address],
                protection,
                self._journal,
                self._snapshots,
                begins=begins,
                joining=self._joining,
                halted=self._halted,
                on_applied=self._applied,
                on_snapshot=self._snapshot_came,
                on_contradiction=self._fail,
                conf=settings,
                consumers=[self._machine],
            )
        except SyncObjException:
            raise ConfigError(port_taken("raft_address", self._voter.raft_address)) from None
        self._changer = MembershipChanger(
            self._voter,
            self._engine,
            committed=lambda: self._committed,
            is_leader=lambda: self.is_leader,
            answer_to=self._answer_to,
        )
        self._engine.addOnTickCallback(self._watch)
        self._ticking = self._environment.ticking(self._engine, self._halted, settings.autoTickPeriod)
        self._ticking.start()

    # Files, and what they say of the voters

    def _open(self) -> Snapshot | None:
        """Open the log; returns the snapshot that it begins with, whose state is in use then."""
        try:
            found = self._snapshots.load()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the registry snapshot {self._folder.disk.path(SNAPSHOT)} cannot be used: {error}. Nothing was "
                f"changed. What it held is on the other voters' disks. {ADVICE}"
            ) from None
        base = None
        if found is not None:
            self._use(found)
            base = found.before, found.last
            # A registry address may have been changed in every node's config; the raft address is who it is.
            configured = {v.raft_address: v for v in self._config.effective_voters}
            self._committed = {a: configured.get(a, voter) for a, voter in found.voters.items()}
        self._journal = self._environment.journal(self._folder.disk, base, on_failure=self._fail)
        if found is None and len(self._journal) and self._journal[0][1] > 1:
            raise ConfigError(
                f"the registry log {self._folder.disk.path(LOG)} begins with entry {self._journal[0][1]}, and the "
                f"snapshot of what was before is gone. Nothing was changed. {ADVICE}"
            )
        after = found.last[1] if found else 0
        changes = [
            change for entry in self._journal[:] if entry[1] > after and (change := change_in(entry[0]))
        ]
        self._in_log = voters_after(self._committed, changes)
        return found

    def _use(self, found: Snapshot) -> None:
        with self._machine.lock:
            self._machine.state = found.state
        self._schema_on_disk = found.state.schema
        self._committed = found.voters

    def _save_snapshot(self, last: Entry, before: Entry) -> None:
        """Have the state after an entry on disk; the log begins with the two then."""
        with self._machine.lock:
            schema = self._machine.state.schema
            # Not the voters that the engine gives: those may be in the log only, and go again.
            data = snapshots.to_bytes(last, before, self._machine.state, self._committed)
        self._snapshots.keep(data)
        self._schema_on_disk = schema

    def _snapshot_came(self, data: bytes) -> Snapshot:
        """The leader has sent a snapshot: go on from it, unless this voter has all of that."""
        found = snapshots.from_bytes(data)
        if self._engine.knows(found.last):
            return found
        try:
            self._snapshots.keep(data)
        except OSError as error:
            self._fail(f"the registry snapshot {self._folder.disk.path(SNAPSHOT)} cannot be written: {error}")
            raise
        self._use(found)
        # The log is emptied now: what it said of the voters, too.
        if self._voter.raft_address in found.voters:
            self._engine.may_stand()
        self._engine.go_on_from(found, list(self._committed.values()))
        return found

    def _applied(self, change: Change) -> None:
        self._committed = change.apply_to(self._committed)
        logger.info(
            "registry: voter %s at %s was %s",
            change.voter.node_id,
            change.voter.raft_address,
            "added" if change.kind == "add" else "removed",
        )

    # The engine's thread

    def _watch(self) -> None:
        """Runs at every tick: notices changes, has a log compacted that is large or that another version could misread.

        A version that does not know the state's schema would refuse its commands one by one, or begin with another
        state, and have another one from then on. A snapshot that it does not know stops it at its start, or when the
        leader sends one: so a new voter writes one at once, and so does each when a newer schema is agreed on.
        """
        self._on_tick()
        seen = (
            self._machine.state.version,
            self._engine._isLeader(),
            self._engine._getLeader(),
            self._engine.voters,
        )
        if seen != self._seen:
            self._seen = seen
            self._notify()
        if self._joining and not self._engine.joining:
            self._folder.joined()
            self._joining = False
        now = self._environment.clock()
        is_large = self._journal.size_bytes > LOG_BYTES_MAX
        is_newer = self._machine.state.schema > self._schema_on_disk
        if (is_large or is_newer) and now - self._compacted_at > COMPACTION_INTERVAL_S:
            self._compacted_at = now
            self._engine.forceLogCompaction()

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._halted.set()
            logger.critical("registry: %s", reason)
            self._notify()

    def _notify(self) -> None:
        # Before the first turn whoever starts this voter is told by an error.
        if not self._notified and self._ticking is not None:
            self._notified = True
            self._ticking.post(self._tell)

    def _tell(self) -> None:
        self._notified = False
        self._on_change()

    # Callers, in the loop

    @property
    def failure(self) -> str | None:
        """Why this voter can take no part any more; it has to be restarted."""
        return self._failure

    @property
    def is_leader(self) -> bool:
        """Whether this voter believes to lead: a reason to try, never a proof."""
        return self._failure is None and bool(self._engine._isLeader())

    @property
    def term(self) -> int:
        """Raft's term: one leader each, at most."""
        return int(self._engine.raftCurrentTerm)

    @property
    def leader(self) -> Voter | None:
        """The leader as far as this voter has heard lately."""
        node = self._engine._getLeader()
        return None if node is None else node.voter

    @property
    def voters(self) -> tuple[Voter, ...]:
        """All voters, this one included."""
        return self._engine.voters

    def read(self, reader: Callable[[State], T]) -> T:
        """Call `reader` with the state as applied here. It must be quick and keep nothing of it."""
        with self._machine.lock:
            return reader(self._machine.state)

    async def propose(
        self, command: log_pb2.RegistryCommand, *, timeout_s: float = 4.0
    ) -> log_pb2.RegistryResult:
        """Commit a command and return the state machine's result.

        The command is applied at most once, however many attempts it takes.

        Raises:
            NoQuorumError: not committed in time, as far as is known; it may still be later. Another
                attempt is safe with a command that may be repeated, and all of ours may.
            InvalidRequestError: the command is too large.
        """
        self._seq += 1
        numbered = log_pb2.RegistryCommand(proposer=self._client_id, seq=self._seq)
        numbered.MergeFrom(command)
        data = numbered.SerializeToString()
        if len(data) > COMMAND_BYTES_MAX:
            raise InvalidRequestError(
                f"a {command.WhichOneof('kind')} command of {len(data)} bytes is too large for the registry, which "
                f"takes {COMMAND_BYTES_MAX}: use fewer ranks, or a smaller 'spread'"
            )
        began = self._loop.time()
        deadline = began + timeout_s
        problem = "did not answer in time"
        async with self._slots:
            while (left_s := deadline - self._loop.time()) > 0:
                if not self.is_leader:
                    problem = "has another leader"
                    break
                answer: asyncio.Future[tuple[bytes | None, int]] = self._loop.create_future()
                self._machine.apply(data, callback=self._answer_to(answer))
                try:
                    async with asyncio.timeout(min(left_s, ATTEMPT_S)):
                        result, reason = await answer
                except TimeoutError:
                    continue
                if reason == FAIL_REASON.SUCCESS and result is not None:
                    self._durations.add("registry_commit", self._loop.time() - began)
                    return log_pb2.RegistryResult.FromString(result)
                if reason in _NOT_COMMITTED:
                    problem = _NOT_COMMITTED[reason]
                    break
        raise NoQuorumError(f"the registry {problem}; trying again is safe")

    async def replace_member(self, old: Voter, new: Voter, *, timeout_s: float) -> None:
        """Have `new` vote in the place of `old`, for good; see `MembershipChanger.replace`."""
        await self._changer.replace(old, new, timeout_s=timeout_s)

    async def add_member(self, new: Voter, *, timeout_s: float) -> None:
        """Have `new` vote as well; see `MembershipChanger.add`."""
        await self._changer.add(new, timeout_s=timeout_s)

    def _answer_to(self, future: asyncio.Future[Any]) -> Callable[[bytes | None, int], None]:
        def settle(result: bytes | None, reason: int) -> None:
            if not future.done():
                future.set_result((result, reason))

        def called(result: bytes | None, reason: int) -> None:
            if self._ticking is not None:
                self._ticking.post(settle, result, reason)

        return called

    def close(self) -> None:
        """Leave the cluster; returns when the log is closed."""
        if self._ticking is not None:
            self._ticking.stop()
        with contextlib.suppress(OSError):  # the disk fails: `failure` has said so
            self._engine.destroy()
        self._folder.release()
