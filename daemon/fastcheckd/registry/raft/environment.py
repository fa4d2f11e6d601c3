"""What the engine stands on: the thread that gives it its turns, its files, clock, port and settings.

The simulation brings its own of each.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pysyncobj import SyncObjConf

from ...config import Config, Voter, split_address
from ...errors import ConfigError
from ...log import Complaints
from ..state import COMMAND_BYTES_MAX
from .engine import Engine
from .journal import Journal
from .voter_folder import VoterFolder

logger = logging.getLogger(__name__)

#: After a turn of the engine that failed.
TURN_PAUSE_S = 0.05


class Ticking(Protocol):
    """What gives an engine its turns."""

    def start(self) -> None:
        """Begin."""

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Have the callers' loop call a function; from a turn or from anywhere."""

    def stop(self) -> None:
        """Return when no turn is under way and none will come."""


class EngineThread:
    """Turns in a thread of their own, each of which waits for what arrives next."""

    def __init__(self, engine: Engine, halted: threading.Event, period_s: float) -> None:
        self._engine = engine
        self._halted = halted
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raft", daemon=True)
        self._complaints = Complaints(logger, "registry", logging.ERROR)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set() and not self._halted.is_set():
            try:
                self._engine.doTick(self._period_s)
            except Exception as error:  # noqa: BLE001  what a peer sends must not end it; a disk that fails halts it
                if not self._halted.is_set():
                    where = "".join(traceback.format_exception(error, limit=-3))
                    self._complaints.add("a turn of the engine failed, it goes on: %s", where)
                    self._stopping.wait(TURN_PAUSE_S)

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Have the callers' loop call a function."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Return when no turn is under way and none will come."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()


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
        raise ConfigError(port_taken(key, address, error.strerror or str(error))) from None


def port_taken(key: str, address: str, reason: str = "it is in use") -> str:
    """What is said of a voter's own address that it cannot listen on."""
    port = split_address(address)[1]
    return (
        f"config key 'voters': cannot listen on this node's {key} {address}: {reason}. Stop what uses port "
        f"{port}, or choose another one in every node's config"
    )


@dataclass(frozen=True, kw_only=True)
class EngineEnvironment:
    """What the engine stands on."""

    folder: Callable[[Config, Voter], VoterFolder] = VoterFolder
    journal: type[Journal] = Journal
    engine: type[Engine] = Engine
    #: Makes what gives an engine its turns: the engine, what halts it, how long a turn waits.
    ticking: Callable[[Engine, threading.Event, float], Ticking] = EngineThread
    #: Monotonic.
    clock: Callable[[], float] = time.monotonic
    check_port: Callable[[str, str], None] = check_port_is_free
    #: A name for this proposer that no other has ever had.
    token: Callable[[], str] = lambda: secrets.token_hex(16)
    #: pysyncobj's, beside ours.
    settings: Mapping[str, object] = field(default_factory=dict)


def engine_settings(raft_address: str, *, alone: bool, more: Mapping[str, object]) -> SyncObjConf:
    """Settings of pysyncobj for one voter.

    Args:
        alone: it is the only voter.
        more: beside ours, or in their place.
    """
    values: dict[str, object] = {
        # Turns are ours to give.
        "autoTick": False,
        # Loopback or one interface: never pysyncobj's default of all of them.
        "bindAddress": raft_address,
        "maxBindRetries": 1,
        # Only idle housekeeping waits for a tick; commands and messages wake the engine at once. A
        # voter alone gets no messages: its commits wait for the next tick.
        "autoTickPeriod": 0.02 if alone else 0.05,
        "appendEntriesPeriod": 0.1,
        "raftMinTimeout": 0.31 if alone else 0.5,
        "raftMaxTimeout": 0.35 if alone else 0.9,
        "leaderFallbackTimeout": 1.0,
        # Batching waits up to 0.1 s for company: 103 ms per commit instead of 0.6.
        "appendEntriesUseBatch": False,
        "appendEntriesBatchSizeBytes": COMMAND_BYTES_MAX + (1 << 20),
        "recvBufferSize": 1 << 18,
        "sendBufferSize": 1 << 18,
        "connectionTimeout": 2.0,
        "connectionRetryTime": 0.5,
        "commandsWaitLeader": False,
        "commandsQueueSize": 1000,
        "dynamicMembershipChange": True,
        "logCompactionMinEntries": 5000,
        # A snapshot every five minutes even of a quiet log would be work for nothing.
        "logCompactionMinTime": 3600,
    }
    return SyncObjConf(**(values | dict(more)))
