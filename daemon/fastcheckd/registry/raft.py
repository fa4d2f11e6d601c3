"""The consensus engine, pysyncobj, behind three things: propose a command, read the state, hear of change.

With `raft_transport` the only module that knows pysyncobj; another engine would replace these two. It
decides nothing: what a command does is in `state`. The engine ticks in a thread of its own, where the
state changes under a lock; callers live in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pysyncobj.journal
import pysyncobj.pickle
import pysyncobj.syncobj
from pysyncobj import SyncObj, SyncObjConf, SyncObjConsumer, replicated
from pysyncobj.config import FAIL_REASON

from ..config import Config, Voter, split_address
from ..errors import ConfigError, InvalidRequestError, NoQuorumError
from . import unpickling
from .journal import Entry, Journal, sync_directory, write_file
from .raft_transport import GuardedTransport
from .records import Json
from .sealing import Seal, derive_key
from .state import apply, new_state, restore, snapshot

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEY_BYTES_MIN = 32
#: A commit of about 20,000 ranks. Commands stay below the engine's batch size, whose code for larger
#: ones cuts them wrongly at some sizes.
COMMAND_BYTES_MAX = 8 << 20
#: The log is compacted when it is larger, not only when it has many entries.
LOG_BYTES_MAX = 64 << 20
COMPACTION_INTERVAL_S = 5.0
#: One attempt to commit; beyond it the outcome is unknown, and the same command is proposed again.
ATTEMPT_S = 1.5
PROPOSALS_MAX = 32

unpickling.install(pysyncobj.pickle, pysyncobj.journal)
#: Journals that are open already, for the engine to pick up by path.
_journals: dict[str, Journal] = {}
pysyncobj.syncobj.createJournal = _journals.pop

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
        self.lock = threading.Lock()
        self.state = new_state()

    @replicated  # type: ignore[untyped-decorator]
    def apply(self, data: bytes) -> bytes:
        """Apply one command."""
        try:
            command = json.loads(data)
            with self.lock:
                return json.dumps(apply(self.state, command)).encode()
        except Exception as error:  # noqa: BLE001  raising here would wedge every voter for good
            return json.dumps({"ok": False, "code": "INTERNAL", "message": repr(error)}).encode()


class _Engine(SyncObj):  # type: ignore[misc]  # pysyncobj has no types
    """pysyncobj with our journal and our seal; does nothing at all once `halted` is set."""

    def __init__(
        self, seal: Seal, journal: Journal, halted: threading.Event, *args: Any, **kwargs: Any
    ) -> None:
        self._fastcheck_seal = seal
        self._halted = halted
        self.journal = journal
        super().__init__(*args, transportClass=GuardedTransport, **kwargs)

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803  pysyncobj's spelling
        if self._halted.is_set():
            # After an error halfway through a tick it would go on with what is not on disk.
            time.sleep(timeToWait)
        else:
            super()._onTick(timeToWait)

    @property
    def encryptor(self) -> Seal:
        """What connections take their seals from."""
        return self._fastcheck_seal

    @property
    def listening(self) -> bool:
        """Whether the raft port is ours."""
        return bool(self._SyncObj__transport.ready)


class Raft:
    """This voter's part in the consensus.

    Args:
        config: with an `own_voter`.
        on_change: called in the loop after the state, the leader or this voter's role has changed,
            and after a failure. Calls are merged.

    Raises:
        ConfigError: a key, port or state directory that the operator has to look at.
    """

    def __init__(self, config: Config, on_change: Callable[[], None]) -> None:
        voter = config.own_voter
        if voter is None:
            raise ConfigError(
                f"config key 'voters' does not name this node, {config.node_id}: it runs no registry"
            )
        self._config = config
        self._voter = voter
        self._by_raft_address = {v.raft_address: v for v in config.effective_voters}
        self._on_change = on_change
        self._machine = _Machine()
        self._folder = config.state_dir / "registry"
        self._snapshot_path = self._folder / "snapshot"
        self._client_id = secrets.token_hex(16)
        self._seq = 0
        self._slots = asyncio.Semaphore(PROPOSALS_MAX)
        self._seen: tuple[Any, ...] = ()
        self._notified = False
        self._compacted_at = 0.0
        self._failure: str | None = None
        self._halted = threading.Event()

    def start(self) -> None:
        """Open the log and join the other voters. Call it in the main thread, inside the running loop.

        The engine's thread ends with the thread that made it, hence the main one.
        """
        assert threading.current_thread() is threading.main_thread(), "the engine dies with its maker"
        self._loop = asyncio.get_running_loop()
        self._claim_folder()
        try:
            self._check_marker()
            key = derive_key(self._read_secret(), self._config.cluster_id)
            self._join(Seal(key), self._open_journal())
        except BaseException:
            self._release_folder()
            raise

    def _join(self, seal: Seal, journal: Journal) -> None:
        log_path = str(self._folder / "log")
        _journals[log_path] = journal
        try:
            check_port_is_free(self._voter.raft_address, "raft_address")
            self._engine = _Engine(
                seal,
                journal,
                self._halted,
                self._voter.raft_address,
                [a for a in self._by_raft_address if a != self._voter.raft_address],
                conf=self._settings(log_path),
                consumers=[self._machine],
            )
        except BaseException:
            _journals.pop(log_path, None)
            journal._destroy()
            raise
        self._engine.addOnTickCallback(self._watch)
        if not self._engine.listening:
            self._engine.destroy_synchronous()
            raise ConfigError(_port_taken("raft_address", self._voter.raft_address))

    def _settings(self, log_path: str) -> Any:
        alone = len(self._by_raft_address) == 1
        return SyncObjConf(
            # Loopback or one interface: never pysyncobj's default of all of them.
            bindAddress=self._voter.raft_address,
            maxBindRetries=1,
            # Only idle housekeeping waits for a tick; commands and messages wake the engine at once. A
            # voter alone gets no messages: its commits wait for the next tick.
            autoTickPeriod=0.02 if alone else 0.05,
            appendEntriesPeriod=0.1,
            raftMinTimeout=0.31 if alone else 0.5,
            raftMaxTimeout=0.35 if alone else 0.9,
            leaderFallbackTimeout=1.0,
            # Batching waits up to 0.1 s for company: 103 ms per commit instead of 0.6.
            appendEntriesUseBatch=False,
            appendEntriesBatchSizeBytes=COMMAND_BYTES_MAX + (1 << 20),
            recvBufferSize=1 << 18,
            sendBufferSize=1 << 18,
            connectionTimeout=2.0,
            connectionRetryTime=0.5,
            commandsWaitLeader=False,
            commandsQueueSize=1000,
            dynamicMembershipChange=False,
            journalFile=log_path,
            fullDumpFile=str(self._snapshot_path),
            serializer=self._write_snapshot,
            deserializer=self._load_snapshot,
            # Never with gRPC, nor with threads.
            useFork=False,
            logCompactionMinEntries=5000,
            # A snapshot every five minutes even of a quiet log would be work for nothing.
            logCompactionMinTime=3600,
        )

    # Files

    def _claim_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = (self._folder / "LOCK").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise ConfigError(
                f"config key 'state_dir': {self._folder} is in use by another registry process; stop that "
                "one, or give this node a state_dir of its own"
            ) from None

    def _release_folder(self) -> None:
        self._lock_file.close()

    def _identity(self) -> Json:
        return {
            "cluster_id": self._config.cluster_id,
            "node_id": self._voter.node_id,
            "raft_address": self._voter.raft_address,
        }

    def _check_marker(self) -> None:
        """A voter that lost its log must not come back as itself: it would vote and acknowledge anew."""
        marker = self._folder / "VOTER"
        identity = self._identity()
        if not marker.exists():
            return
        try:
            known = json.loads(marker.read_bytes())
        except ValueError:
            known = None
        if known != identity:
            raise ConfigError(
                f"config key 'state_dir': {self._folder} belongs to the voter {known}, not to {identity}; "
                "use another state_dir, or restore the config"
            )
        if not (self._folder / "log").exists():
            raise ConfigError(
                f"the registry log {self._folder / 'log'} is gone: a voter without its log would vote and "
                "acknowledge as if for the first time, and committed steps could be lost. If other voters "
                f"are healthy, move {self._folder} away and give this voter a new raft_address in "
                "every node's 'voters'; only when the whole cluster starts over, delete it on all voters"
            )

    def _read_secret(self) -> bytes:
        path = self._config.raft_key_file
        if path is None:
            if len(self._by_raft_address) > 1:
                raise ConfigError(
                    "config key 'raft_key_file' is missing: several voters need a shared secret; make one "
                    "with: head -c 32 /dev/urandom > raft.key && chmod 600 raft.key; copy it to every voter"
                )
            path = self._config.state_dir / "raft.key"
            if not path.exists():
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor with its mode set from the start
                    file.write(secrets.token_bytes(KEY_BYTES_MIN))
                sync_directory(path.parent)
        try:
            mode = path.stat().st_mode
            secret = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"config key 'raft_key_file': cannot read {path}: {error.strerror}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"config key 'raft_key_file': others may read {path}; run: chmod 600 {path}")
        if len(secret) < KEY_BYTES_MIN:
            raise ConfigError(
                f"config key 'raft_key_file': {path} has {len(secret)} bytes, {KEY_BYTES_MIN} are needed; "
                f"make it anew with: head -c 32 /dev/urandom > {path}"
            )
        return secret

    def _open_journal(self) -> Journal:
        base: Entry | None = None
        if self._snapshot_path.exists():
            try:
                base = _read_snapshot(self._snapshot_path)[1]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"the registry snapshot {self._snapshot_path} cannot be used ({error}); restore it, or "
                    "treat this voter as lost: move its folder away and give it a new raft_address"
                ) from None
        journal = Journal(self._folder / "log", base, on_failure=self._fail)
        # After the log, so that a crash in between is not taken for a lost log.
        write_file(self._folder / "VOTER", json.dumps(self._identity()).encode())
        return journal

    def _write_snapshot(self, path: str, entries: tuple[Any, ...]) -> None:
        """The engine's `serializer`: the state after two entries, which the log then starts with."""
        with self._machine.lock:
            state = snapshot(self._machine.state)
        last, before = (_entry_to_json(entry) for entry in entries[:2])
        document = {"format": 1, "last": last, "before": before, "state": state.decode()}
        with open(path, "wb") as file:  # noqa: PTH123  pysyncobj gives the path as text, and renames it itself
            file.write(json.dumps(document).encode())
            file.flush()
            os.fsync(file.fileno())

    def _load_snapshot(self, path: str) -> tuple[Entry, Entry, tuple[()]]:
        """The engine's `deserializer`: at start, and when the leader has sent its snapshot."""
        try:
            with open(path, "rb") as file:  # noqa: PTH123  the engine received it and synced nothing
                os.fsync(file.fileno())
            sync_directory(self._folder)
            last, before, state = _read_snapshot(Path(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            # The engine would log this and go on with a state that is not the cluster's.
            self._fail(f"the registry snapshot {path} cannot be used: {error}")
            raise
        with self._machine.lock:
            self._machine.state = state
        return last, before, ()

    # The engine's thread

    def _watch(self) -> None:
        """Runs at every tick: notices changes, has a large log compacted."""
        seen = (self._machine.state["version"], self._engine._isLeader(), self._engine._getLeader())
        if seen != self._seen:
            self._seen = seen
            self._notify()
        now = time.monotonic()
        if (
            self._engine.journal.size_bytes > LOG_BYTES_MAX
            and now - self._compacted_at > COMPACTION_INTERVAL_S
        ):
            self._compacted_at = now
            self._engine.forceLogCompaction()

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._halted.set()
            logger.critical("registry: %s", reason)
            self._notify()

    def _notify(self) -> None:
        if not self._notified and not self._loop.is_closed():
            self._notified = True
            self._loop.call_soon_threadsafe(self._tell)

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
        return None if node is None else self._by_raft_address.get(node.id)

    @property
    def voters(self) -> tuple[Voter, ...]:
        """All voters, this one included."""
        return tuple(self._by_raft_address.values())

    def read(self, reader: Callable[[Json], T]) -> T:
        """Call `reader` with the state as applied here. It must be quick and keep nothing of it."""
        with self._machine.lock:
            return reader(self._machine.state)

    async def propose(self, command: Json, *, timeout_s: float = 4.0) -> Json:
        """Commit a command and return the state machine's result.

        The command is applied at most once, however many attempts it takes.

        Raises:
            NoQuorumError: not committed in time, as far as is known; it may still be later. Another
                attempt is safe with a command that may be repeated, and all of ours may.
            InvalidRequestError: the command is too large.
        """
        self._seq += 1
        numbered = {**command, "client_id": self._client_id, "seq": self._seq}
        data = json.dumps(numbered, separators=(",", ":")).encode()
        if len(data) > COMMAND_BYTES_MAX:
            raise InvalidRequestError(
                f"a {command['type']} command of {len(data)} bytes is too large for the registry, which "
                f"takes {COMMAND_BYTES_MAX}: use fewer ranks, or a smaller 'spread'"
            )
        deadline = self._loop.time() + timeout_s
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
                    return dict(json.loads(result))
                if reason in _NOT_COMMITTED:
                    problem = _NOT_COMMITTED[reason]
                    break
        raise NoQuorumError(f"the registry {problem}; trying again is safe")

    def _answer_to(self, future: asyncio.Future[Any]) -> Callable[[bytes | None, int], None]:
        def settle(result: bytes | None, reason: int) -> None:
            if not future.done():
                future.set_result((result, reason))

        def called(result: bytes | None, reason: int) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(settle, result, reason)

        return called

    def close(self) -> None:
        """Leave the cluster; returns when the log is closed."""
        self._engine.destroy_synchronous()
        self._release_folder()


def _entry_to_json(entry: Entry) -> list[Any]:
    command, index, term = entry
    return [base64.b64encode(command).decode(), index, term]


def _entry_from_json(value: Any) -> Entry:
    command, index, term = value
    return base64.b64decode(command, validate=True), int(index), int(term)


def _read_snapshot(path: Path) -> tuple[Entry, Entry, Json]:
    """The last entry in a snapshot, the one before it, and the state."""
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict) or document.get("format") != 1:
        raise ValueError("not a snapshot of a format that this version reads")
    last, before = _entry_from_json(document["last"]), _entry_from_json(document["before"])
    return last, before, restore(document["state"].encode())


def check_port_is_free(address: str, key: str) -> None:
    """Raise ConfigError when a voter's own address cannot be bound.

    The engine would retry in silence and look like a voter that nobody reaches.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise ConfigError(_port_taken(key, address, error.strerror or str(error))) from None


def _port_taken(key: str, address: str, reason: str = "it is in use") -> str:
    port = split_address(address)[1]
    return (
        f"config key 'voters': cannot listen on this node's {key} {address}: {reason}. Stop what uses port "
        f"{port}, or choose another one in every node's config"
    )
