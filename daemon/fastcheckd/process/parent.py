"""The parent: `fastcheckd run` itself, which forks the processes of the node and starts anew what ends.

It has one thread and no event loop, and opens no channel and no port: a fork copies only the thread that forks, and
what other threads were holding then is held for ever in the copy. Why it is built so: docs/decisions/0005.

    start data, agent ──▶ registry, when the agent asks ──▶ SIGTERM: end agent, then data, then registry
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from fastcheck_proto.v1 import node_pb2 as pb

from ..config import Config
from ..errors import EXIT_CONFIG, ConfigError
from ..health.vitals import RESTART_AFTER
from ..registry.known_voters import with_voters
from ..registry.raft.membership import voter_of
from . import agent, data, registry
from .child import Child, close
from .runtime import LIVENESS_INTERVAL_S, LivenessPipe, read_liveness
from .supervisor import MESSAGE_BYTES_MAX, Supervisor
from .systemd import Notifier, RelayedNotifier

logger = logging.getLogger(__name__)

#: Beyond a drain: the agent takes leave of the registry and of those who are asking it something.
AGENT_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1
_OURS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Role:
    """What a forked process is to do."""

    #: agent, data or registry.
    name: str
    config: Config
    run: Callable[[], Coroutine[Any, Any, None]]


class Parent:
    """Supervision of one node. Signals and exits are its own: make one per process, in the main thread."""

    def __init__(self, config: Config, notifier: Notifier) -> None:
        now = time.monotonic()
        self._config = config
        self._notifier = notifier
        self._children = {name: Child(name, config, now) for name in ("data", "agent")}
        #: The configuration of the registry process that is to run; None: there is to be none.
        self._voter: Config | None = None
        #: Number of the last request of the agent that runs now.
        self._answered = 0
        self._registry_refused = False
        #: The agent has been sent this.
        self._told = b""
        #: There is news for it that it does not take yet.
        self._untold = False
        #: When it is next looked whether all go on.
        self._look_at = now
        self._watchdog_withheld = False
        #: Once set, nothing is started any more, and this ends when everything has ended.
        self._exit_code: int | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()

    def run(self) -> Role | int:
        """Supervise until all is stopped; the exit code.

        It returns a role instead in every process that it has forked. Whoever gets one runs it, with nothing left of
        the parent.
        """
        _raise_file_limit()
        for end in (self._wakeup, self._wakeup_end):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno())
        for number in _OURS:
            signal.signal(number, lambda _number, _frame: None)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._take_signals)
        # Collections in a child would write to every page of what was imported, and so copy it.
        gc.collect()
        gc.freeze()
        while True:
            if self._exit_code is None:
                self._go_by_voter()
                if (role := self._start_due()) is not None:
                    return role
            elif self._children:
                self._stop_next()
            else:
                return self._exit_code
            self._look_at_progress()
            self._tell_agent()
            for key, _ in self._selector.select(self._idle_s()):
                key.data()

    # --- starting ---------------------------------------------------------------------------------

    def _start_due(self) -> Role | None:
        for child in self._children.values():
            due = child.restarts.pid is None and time.monotonic() >= child.restarts.start_at
            if due and (role := self._fork(child)) is not None:
                return role
        return None

    def _fork(self, child: Child) -> Role | None:
        """Start a process; its role in the new process, None in this one, whether it could be started or not."""
        line: socket.socket | None = None
        liveness_fd: int | None = None
        parent_pid = os.getpid()
        # A signal that the new process gets before it has let go of the parent's handlers would be told to the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        try:
            if child.name != "data":  # the agent asks that one
                child.liveness_fd, liveness_fd = os.pipe()
            if child.name == "agent":
                child.line, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except (OSError, MemoryError) as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
            close(line, liveness_fd)
            child.not_started(error, time.monotonic())
            return None
        if pid == 0:
            return self._become(child, line, liveness_fd, parent_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        close(line, liveness_fd)
        child.started(pid, time.monotonic())
        if child.line is not None:
            self._answered, self._told = 0, b""
            child.line.setblocking(False)
            self._selector.register(child.line, selectors.EVENT_READ, partial(self._take_request, child))
        if child.liveness_fd is not None:
            os.set_blocking(child.liveness_fd, False)
            self._selector.register(
                child.liveness_fd, selectors.EVENT_READ, partial(self._take_liveness, child)
            )
        return None

    def _become(
        self, child: Child, line: socket.socket | None, liveness_fd: int | None, parent_pid: int
    ) -> Role:
        """Let go of everything that is the parent's; what is left is a process that has imported its modules."""
        _raise_file_limit()  # it may have been lowered since the parent's start
        signal.set_wakeup_fd(-1)
        # Ctrl-C reaches every process of a terminal; who ends when is the parent's to say.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before we asked
            os._exit(1)
        self._selector.close()
        self._wakeup.close()
        self._wakeup_end.close()
        for other in self._children.values():
            close(other.line, other.liveness_fd)
        with contextlib.suppress(OSError):  # it is for people who look
            Path("/proc/self/comm").write_text(f"fcheck-{child.name}")
        run = partial(data.run, child.config)
        if line is not None and liveness_fd is not None:
            supervisor = Supervisor(line)
            relayed = RelayedNotifier(self._notifier, supervisor.notify)
            run = partial(agent.run, child.config, supervisor, relayed, LivenessPipe(liveness_fd))
        elif liveness_fd is not None:
            run = partial(registry.run, child.config, LivenessPipe(liveness_fd))
        self._notifier.close()
        return Role(child.name, child.config, run)

    # --- ends -------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        numbers = self._wakeup.recv(4096)
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            running = self._children.get("agent")
            if self._exit_code is not None and running is not None and running.restarts.pid is not None:
                # Once more tells an agent that drains not to wait for that.
                os.kill(running.restarts.pid, signal.SIGTERM)
            self._stop(0)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # As the first process of a container this one also inherits processes that it never started.
            for child in list(self._children.values()):
                if child.restarts.pid == pid:
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: Child, code: int) -> None:
        for end in (child.line, child.liveness_fd):
            if end is not None:
                self._selector.unregister(end)
        child.close()
        if self._exit_code is not None or child.kill_at is not None:
            del self._children[child.name]
            return
        if code == EXIT_CONFIG and child.restarts.restarts == 0:
            # Nothing that a new start would change; its message is above.
            if child.name == "registry":  # the agent knows whether the node can do without
                del self._children[child.name]
                self._voter, self._registry_refused = None, True
            else:
                logger.error("the %s process cannot start; its message is above", child.name)
                del self._children[child.name]
                self._stop(EXIT_CONFIG)
            return
        pause_s = child.restarts.ended(str(code), time.monotonic())
        logger.warning("%s process ended with %s; restarting in %.1f s", child.name, code, pause_s)

    # --- stopping ---------------------------------------------------------------------------------

    def _stop(self, exit_code: int) -> None:
        if self._exit_code is not None:
            return
        self._exit_code = exit_code
        for name in [name for name, child in self._children.items() if child.restarts.pid is None]:
            del self._children[name]

    def _stop_next(self) -> None:
        """Have the processes end, one after the other."""
        for name in ("agent", "data", "registry"):
            if (child := self._children.get(name)) is not None:
                self._end(child)
                return

    def _end(self, child: Child) -> None:
        grace_s = self._config.shutdown_grace_s
        if child.name == "agent":
            grace_s += AGENT_STOP_S + self._config.drain_on_stop_s
        child.end(time.monotonic(), grace_s)

    # --- the agent --------------------------------------------------------------------------------

    def _take_request(self, child: Child) -> None:
        if child.line is None:  # it was closed after this was found readable
            return
        try:
            message = child.line.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return
        except ConnectionError:  # it ended with answers unread
            message = b""
        if not message:  # its end; SIGCHLD says the rest
            self._selector.unregister(child.line)
            child.line.close()
            child.line = None
            return
        try:
            request = pb.ParentRequest.FromString(message)
        except DecodeError:
            logger.error("the agent said something that is no request; ending it, to start it anew")
            child.kill()
            return
        self._answered = request.number
        asked = request.WhichOneof("request")
        if asked == "run_registry":
            self._run_registry(request.run_registry)
        elif asked == "stop_registry":
            self._voter, self._registry_refused = None, False
        elif asked == "kill_data":
            running = self._children.get("data")
            if running is not None and running.restarts.pid == request.kill_data.pid:
                running.kill()
        elif asked == "notify":
            self._notify(dict(request.notify.said))

    def _run_registry(self, request: pb.RunRegistry) -> None:
        try:
            self._voter = with_voters(self._config, [voter_of(record) for record in request.voters])
            self._registry_refused = False
        except ConfigError as error:
            logger.error("the registry process cannot start: %s", error)
            self._voter, self._registry_refused = None, True

    def _go_by_voter(self) -> None:
        """Have a registry process of the voter that this node is to be, and no other."""
        child, wanted = self._children.get("registry"), self._voter
        if child is None:
            if wanted is not None:
                self._children["registry"] = Child("registry", wanted, time.monotonic())
        elif wanted is None or wanted.own_voter != child.config.own_voter or child.kill_at is not None:
            if child.restarts.pid is None:
                del self._children["registry"]
            else:
                self._end(child)

    def _tell_agent(self) -> None:
        """What the processes are like, if that is news."""
        told = self._children.get("agent")
        if told is None or told.line is None:
            return
        now = time.monotonic()
        states = {name: child.state(now) for name, child in self._children.items()}
        message = pb.NodeProcesses(
            answered=self._answered, registry_refused=self._registry_refused, **states
        ).SerializeToString()
        if message != self._told:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # it is busy, and told later, or gone
                told.line.send(message)
                self._told = message
        self._untold = message != self._told

    def _notify(self, said: dict[str, str]) -> None:
        """Pass on what systemd is to know; no sign of life for it while the registry process gives none."""
        child = self._children.get("registry")
        silent_s = 0.0 if child is None else time.monotonic() - child.went_on_at
        withheld = silent_s > 2 * RESTART_AFTER * self._config.data_hung_after_s
        if withheld:
            said.pop("WATCHDOG", None)
            if not self._watchdog_withheld:
                logger.error("no progress of registry: the watchdog gets no sign of life any more")
        self._watchdog_withheld = withheld
        self._notifier.tell(**said)

    # --- signs of life ----------------------------------------------------------------------------

    def _take_liveness(self, child: Child) -> None:
        if child.liveness_fd is None:  # as above
            return
        taken = read_liveness(child.liveness_fd)
        if taken:
            child.vitals.answered()
            child.went_on_at = time.monotonic()
        elif taken is None:
            self._selector.unregister(child.liveness_fd)
            os.close(child.liveness_fd)
            child.liveness_fd = None

    def _look_at_progress(self) -> None:
        """End a process that gives no sign of life any more; the loop starts it anew."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LIVENESS_INTERVAL_S
        for child in self._children.values():
            child.vitals.look(child.restarts.pid, now)
            if child.vitals.must_restart and child.kill_at is None:
                logger.error(
                    "the %s process (pid %s) has made no progress for %g s: ending it, to start it anew",
                    child.name,
                    child.restarts.pid,
                    RESTART_AFTER * self._config.data_hung_after_s,
                )
                child.kill()

    def _idle_s(self) -> float | None:
        """How long nothing is to be done by itself; None: until something happens."""
        now = time.monotonic()
        times = [child.kill_at for child in self._children.values()]
        if self._exit_code is None:
            times += [child.restarts.wakes_at(now) for child in self._children.values()]
        if self._children:
            times.append(self._look_at)
        if self._untold:
            times.append(now + LIVENESS_INTERVAL_S)
        return min((max(0.0, at - now) for at in times if at is not None), default=None)


def _raise_file_limit() -> None:
    """Every mapped segment and every lane holds a descriptor: use what the system lets us have."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
