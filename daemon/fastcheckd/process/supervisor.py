"""The agent's end of the line to its parent, which starts, ends and restarts the processes of the node.

The parent answers every change with a snapshot of all processes, so a snapshot that is missed costs nothing. What it
says of the registry process counts only if it knows the last request: an older snapshot may name the one before.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence

from fastcheck_proto.v1 import node_pb2 as pb

from ..errors import ConfigError

logger = logging.getLogger(__name__)

#: Of a message either way: the longest names seven voters.
MESSAGE_BYTES_MAX = 64 << 10


class Supervisor:
    """Use it from one event loop.

    Args:
        line: the agent's end of the socket pair; it is closed with `close`.
    """

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        #: Of the last request, and of the last about the registry process.
        self._number = self._registry_number = 0
        #: As the parent has last told them.
        self.processes = pb.NodeProcesses()
        self._told = asyncio.Condition()
        self._on_refused: Callable[[Exception], None] | None = None

    @property
    def registry(self) -> pb.ProcessState | None:
        """The registry process that was asked for last; None: nothing is known of it yet, or there is to be none."""
        return self.processes.registry if self._is_answered and self.processes.HasField("registry") else None

    @property
    def _is_answered(self) -> bool:
        """Whether the parent knew the last request about the registry process when it told the processes."""
        return self.processes.answered >= self._registry_number

    async def run(self) -> None:
        """Take what the parent says until cancelled, or until it is gone: then this process is ended, too."""
        loop = asyncio.get_running_loop()
        while message := await loop.sock_recv(self._line, MESSAGE_BYTES_MAX):
            self.processes = pb.NodeProcesses.FromString(message)
            async with self._told:
                self._told.notify_all()
            if self._is_answered and self.processes.registry_refused and self._on_refused is not None:
                on_refused, self._on_refused = self._on_refused, None
                on_refused(ConfigError("the registry process cannot start; its message is above"))

    def run_registry(self, voters: Sequence[pb.VoterRecord], on_refused: Callable[[Exception], None]) -> None:
        """Have a registry process run, with these voters.

        Args:
            on_refused: told when it cannot work as configured; it is not started again then.

        Raises:
            OSError: the parent takes no requests.
        """
        self._on_refused = on_refused
        self._send(pb.ParentRequest(run_registry=pb.RunRegistry(voters=voters)))
        self._registry_number = self._number

    def drop_registry(self) -> None:
        """Have the registry process ended, if there is one, and none started.

        Raises:
            OSError: the parent takes no requests.
        """
        self._on_refused = None
        self._send(pb.ParentRequest(stop_registry=pb.StopRegistry()))
        self._registry_number = self._number

    async def stop_registry(self) -> None:
        """As `drop_registry`; returns when it has ended.

        Raises:
            OSError: the parent takes no requests.
        """
        self.drop_registry()
        async with self._told:
            await self._told.wait_for(lambda: self._is_answered and not self.processes.HasField("registry"))

    @property
    def data_pid(self) -> int | None:
        """Process id of the data process while it runs."""
        return self.processes.data.pid or None

    def kill_data(self, pid: int) -> None:
        """SIGKILL the data process, for it to be started again, if it still has this id."""
        try:
            self._send(pb.ParentRequest(kill_data=pb.KillData(pid=pid)))
        except OSError as error:  # asked again as long as it hangs
            logger.warning("the parent does not take the request to end the data process: %s", error)

    def notify(self, said: Mapping[str, str]) -> None:
        """Tell systemd assignments such as READY → 1."""
        try:
            self._send(pb.ParentRequest(notify=pb.Notify(said=said)))
        except OSError as error:  # the next one comes anyway
            logger.debug("the parent did not take %r: %s", said, error)

    def _send(self, request: pb.ParentRequest) -> None:
        request.number = self._number + 1
        self._line.send(request.SerializeToString())
        self._number = request.number

    def close(self) -> None:
        """Say and hear nothing more."""
        self._line.close()
