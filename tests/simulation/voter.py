"""A voter of a run: the daemon's own engine, pysyncobj and all, on virtual sockets, a simulated disk and clock.

Turns are given when something has arrived and every so often, as the engine's thread would. A process may be killed at
any operation on its disk or its connections, in the middle of whatever it handles (`fuse`).
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pysyncobj.node
import pysyncobj.syncobj
import pysyncobj.tcp_connection
import pysyncobj.tcp_server
import pysyncobj.transport
from pysyncobj.syncobj import _RAFT_STATE
from tests.simulation.consensus import Consensus, Log
from tests.simulation.disk import SimulatedDisk
from tests.simulation.sockets import Hosts, SocketModule, VirtualPoller
from tests.simulation.virtual_time import PROCESS, Killed, Process, VirtualLoop

from fastcheck_proto.v1.registry_log_pb2 import RegistryCommand
from fastcheckd.config import Config, Voter
from fastcheckd.registry.raft import adapter as raft_module
from fastcheckd.registry.raft import engine, transport
from fastcheckd.registry.raft.adapter import Raft
from fastcheckd.registry.raft.engine import Engine
from fastcheckd.registry.raft.environment import EngineEnvironment
from fastcheckd.registry.raft.journal import Journal
from fastcheckd.registry.raft.messages import TAG_BYTES, Seal
from fastcheckd.registry.raft.voter_folder import VoterFolder
from fastcheckd.registry.state import apply

if TYPE_CHECKING:
    from tests.simulation.machine import Machine

#: How often, per entry applied, a voter's log is compacted.
COMPACTION_ODDS = 0.01
#: Smaller than in the daemon, so that what a voter has missed comes in several appends.
BATCH_BYTES = 24 << 10


class VoterProcess:
    """What a registry process has beside its event loop."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine = machine
        self.process = process
        self.poller = VirtualPoller()
        #: Operations on disk or connections until it dies.
        self.fuse: int | None = None
        #: The entry that the state machine is given.
        self.applying = 0
        #: It waits for its disk until then, by the true clock.
        self.busy_until = 0.0
        process.voter = self
        process.mourners["sockets"] = self._died

    def _died(self) -> None:
        for socket in list(self.poller.sockets.values()):
            socket.left_behind(self.machine.alive)

    def step(self) -> None:
        """Before every operation that others may see."""
        if self.process.dead:
            raise Killed(just_now=False)
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                self.machine.world.truth.note(f"{self.process.name} dies in the middle of something")
                self.machine.kill_part("registry")
                self.machine.restart_registry()
                raise Killed(just_now=True)

    def spend(self, seconds: float) -> None:
        """The disk makes it wait; whatever it does from now on happens later."""
        if seconds:
            self.busy_until = max(self.busy_until, self.process.loop.now) + seconds

    def busy_s(self) -> float:
        return max(0.0, self.busy_until - self.process.loop.now)

    def disk(self) -> SimulatedDisk:
        return SimulatedDisk(self.machine.platter, self.step, self.spend)


def current() -> VoterProcess:
    process = PROCESS.get()
    assert process is not None
    voter: VoterProcess = process.voter
    return voter


class Folder(VoterFolder):
    """A voter's files on its machine's disk."""

    def __init__(self, config: Config, voter: Voter) -> None:
        super().__init__(config, voter)
        self.disk = current().disk()

    def claim(self) -> None:
        pass

    def release(self) -> None:
        pass

    def protection(self) -> Seal:
        return _Unsealed(b"")


class _Unsealed(Seal):
    """A seal by its form: nobody forges anything here."""

    def fresh(self, *, accepting: bool) -> Seal:
        return _Unsealed(b"", accepting=accepting)

    def _tag(self, from_accepting: bool, number: int, data: bytes) -> bytes:
        return number.to_bytes(TAG_BYTES, "big")


class WatchedJournal(Journal):
    """Its changes are seen by `Consensus`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        voter = current()
        self._seen = voter.machine.world.consensus.log_of(voter.machine.name)
        super().__init__(*args, **kwargs)
        self._seen.opened(self[:], self._synced)

    def add(self, command: bytes, idx: int, term: int) -> None:
        super().add(command, idx, term)
        self._seen.added(idx, term, bytes(command))

    def sync(self) -> None:
        super().sync()
        self._seen.synced = self._synced

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N803  pysyncobj's spelling
        super().deleteEntriesFrom(entryFrom)
        self._seen.cut(self[:], self._synced, self.getCurrentTerm())

    def _write(self, entries: list[Any]) -> None:
        super()._write(entries)
        self._seen.opened(entries, self._synced)


class WatchedEngine(Engine):
    """Its elections, acknowledgements, commits and applied entries are seen by `Consensus`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        voter = current()
        self._voter = voter
        self._consensus: Consensus = voter.machine.world.consensus
        self._seen: Log = self._consensus.log_of(voter.machine.name)
        self._rng = voter.machine.world.rng(f"compaction/{voter.process.name}/{voter.machine.lives}")
        super().__init__(*args, **kwargs)

    def _SyncObj__setState(self, state: int) -> None:
        was = self._SyncObj__raftState
        super()._SyncObj__setState(state)
        if state == _RAFT_STATE.LEADER != was:
            self._consensus.elected(self._SyncObj__raftCurrentTerm, self._seen)

    def go_on_from(self, *args: Any) -> None:
        self._consensus.snapshots += 1
        super().go_on_from(*args)

    def _SyncObj__sendNextNodeIdx(self, node: Any, *args: Any, **kwargs: Any) -> None:
        super()._SyncObj__sendNextNodeIdx(node, *args, **kwargs)
        if kwargs.get("success") and not self._halted.is_set():
            index, first = kwargs["nextNodeIdx"] - 1, self.journal[0][1]
            self._consensus.acknowledged(self._seen, index, first, self._SyncObj__raftCurrentTerm)

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:
        index = self._SyncObj__raftLastApplied + 1
        leads = self._SyncObj__raftState == _RAFT_STATE.LEADER
        self._consensus.applied(self._seen, index, self._SyncObj__raftCurrentTerm if leads else None)
        self._voter.applying = index
        if self._rng.random() < COMPACTION_ODDS:
            self.forceLogCompaction()
        return super()._SyncObj__doApplyCommand(command)


class Turns:
    """The engine's turns, in place of its thread."""

    def __init__(self, engine: Engine, halted: threading.Event, period_s: float) -> None:
        self._engine = engine
        self._halted = halted
        self._period_s = period_s
        self._voter = current()
        self._process = self._voter.process
        self._coming = False
        self._stopped = False
        self._voter.poller.wake = self.wake

    def start(self) -> None:
        self._due = self._process.now
        self._wait()

    def _wait(self) -> None:
        """Nothing has arrived for a period, or something has, and the period is over later."""
        left_s = self._due - self._process.now
        if left_s <= 1e-6:
            self.wake()
            left_s = self._period_s
        self._process.later(left_s / self._process.clock.rate, self._wait)

    def wake(self) -> None:
        if not self._coming and not self._process.dead:
            self._coming = True
            if wait_s := self._voter.busy_s():
                self._process.later(wait_s, self._turn)
            else:
                self._process.call(self._turn)

    def _turn(self) -> None:
        self._coming = False
        self._due = self._process.now + self._period_s
        if self._stopped or self._halted.is_set():
            return
        try:
            self._engine.events()
            self._engine.doTick(0.0)
        except OSError:
            if not self._halted.is_set():
                raise
        if self._voter.poller.dispatched:
            self.wake()

    def post(self, function: Callable[..., object], *args: object) -> None:
        if wait_s := self._voter.busy_s():
            self._process.later(wait_s, function, *args)
        else:
            self._process.call(function, *args)

    def stop(self) -> None:
        self._stopped = True


class _Notifier:
    """In place of pysyncobj's pipe."""

    def __init__(self, poller: VirtualPoller, callback: Callable[[], None] | None = None) -> None:
        self._poller = poller

    def notify(self) -> None:
        self._poller.wake()


class _Resolver:
    """Addresses are addresses here."""

    def setTimeouts(self, *_: object) -> None:
        pass

    def setPreferredAddrFamily(self, _: object) -> None:
        pass

    def resolve(self, host: str) -> str:
        return host


def make(
    machine: Machine,
    config: Config,
    on_change: Callable[[], None],
    life: str,
) -> Raft:
    """A voter's engine, for one life of its process: the one that calls."""
    return Raft(
        config,
        on_change,
        environment=EngineEnvironment(
            folder=Folder,
            journal=WatchedJournal,
            engine=WatchedEngine,
            ticking=Turns,
            clock=engine.monotonic,
            check_port=lambda _address, _key: None,
            token=lambda: life,
            settings={"appendEntriesBatchSizeBytes": BATCH_BYTES},
        ),
    )


def _apply(state: Any, entry: bytes) -> Any:
    """The state machine, watched by `Truth`."""
    voter, result = current(), apply(state, entry)
    machine, command = voter.machine, RegistryCommand.FromString(entry)
    machine.world.truth.applied(f"{machine.name}/{machine.lives}", voter.applying, command, result, state)
    return result


@contextmanager
def grounded(loop: VirtualLoop, hosts: Hosts, rng: random.Random) -> Iterator[None]:
    """pysyncobj takes its clock, sockets and chance from the run, for as long as the context lasts."""

    process_of = PROCESS.get

    def now() -> float:
        process = process_of()
        clock, busy_until = process.clock, process.voter.busy_until  # type: ignore[union-attr]
        return clock.offset_s + max(loop.now, busy_until) * clock.rate  # type: ignore[no-any-return]

    def urandom(size: int) -> bytes:
        return rng.randbytes(size)

    sockets = SocketModule(hosts)
    clock = types.SimpleNamespace(monotonic=now)
    plain = types.SimpleNamespace(compress=lambda data, _level=0: data, decompress=lambda data: data)
    resolver = _Resolver()
    with ExitStack() as stack:
        for where, name, instead in (
            (pysyncobj.syncobj, "monotonicTime", now),
            (pysyncobj.tcp_connection, "monotonicTime", now),
            (pysyncobj.transport, "monotonicTime", now),
            (engine, "monotonic", now),
            (raft_module, "apply", _apply),
            (transport, "time", clock),
            (pysyncobj.syncobj, "createPoller", lambda _type: current().poller),
            (pysyncobj.syncobj, "PipeNotifier", _Notifier),
            (pysyncobj.tcp_connection, "socket", sockets),
            (pysyncobj.tcp_server, "socket", sockets),
            # What a message is packed in is of no interest, and most of its cost.
            (pysyncobj.tcp_connection, "zlib", plain),
            (pysyncobj.transport, "os", types.SimpleNamespace(urandom=urandom)),
            (pysyncobj.node, "globalDnsResolver", lambda: resolver),
            (pysyncobj.transport, "globalDnsResolver", lambda: resolver),
            (pysyncobj.syncobj, "globalDnsResolver", lambda: resolver),
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        yield
