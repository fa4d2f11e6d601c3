"""What the processes of a node share: how they are stopped, how they listen, how they tell the parent that they work.

Signs of life go over a pipe: there is nobody to authenticate, nothing to bound but the pipe itself, and it works before
and without everything that the process serves. A sign says nothing but that it was given, so its bytes are thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

from ..dialer import Dialer
from ..errors import ConfigError
from ..rpc import connections_max

logger = logging.getLogger(__name__)

#: How often a process looks whether its ports may be full.
CROWD_LOOK_S = 2.0
#: How often a process that works says so.
LIVENESS_INTERVAL_S = 1.0
_READ_BYTES_MAX = 4096


def stop_signal() -> asyncio.Future[None]:
    """A future that SIGTERM completes."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopping.done():
            stopping.set_result(None)

    loop.add_signal_handler(signal.SIGTERM, stop)
    return stopping


@contextlib.asynccontextmanager
async def watching_crowds() -> AsyncIterator[None]:
    """Say so when a port may be full: gRPC turns away whoever comes next, and tells nobody."""
    watching = asyncio.create_task(_watch_crowds(), name="crowds")
    try:
        yield
    finally:
        watching.cancel()


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  the names are all that is needed


async def _watch_crowds() -> None:
    crowded, most = False, connections_max()
    while True:
        await asyncio.sleep(CROWD_LOOK_S)
        try:
            count = _open_descriptors()
        except OSError:  # none is left to look with
            count = most
        if crowded == (count >= most):
            continue
        crowded = not crowded
        if crowded:
            logger.warning(
                "%d descriptors are open; a port that has %d connections turns others away: look who connects (ss -tn)",
                count,
                most,
            )
        else:
            logger.info("%d descriptors are open: the ports have room again", count)


def private_directory(path: Path) -> None:
    """Make a directory that only this user may enter, or refuse one that others can."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{path} must be a directory of this user that nobody else may write to; fix it or set runtime_dir"
        )


def listen_tcp(server: grpc.aio.Server, dialer: Dialer, address: str, key: str) -> None:
    """Have a server listen; ConfigError, which names the `key` to change, where that cannot be."""
    try:
        bound = dialer.listen(server, address)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the address is not of this machine; "
            f"change {key} or host"
        )


@contextlib.asynccontextmanager
async def listening(server: grpc.aio.Server, socket: Path | None = None) -> AsyncIterator[None]:
    """Serve while the context lasts, on a Unix socket too if one is given."""
    if socket is not None:
        if len(str(socket)) > 100:
            raise ConfigError(
                f"the socket path {socket} is too long for the kernel; set a shorter runtime_dir"
            )
        # Left by an earlier life; whether one still runs, the TCP port has told.
        socket.unlink(missing_ok=True)  # noqa: ASYNC240  before serving, nobody waits
        server.add_insecure_port(f"unix://{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=0.2)


class LivenessPipe:
    """The end of the process that is watched; `fd` is its own from now on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    def write(self) -> None:
        """Once more. A full pipe has signs enough; a parent that is gone ends this process by other means."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, b".")


def read_liveness(fd: int) -> bool | None:
    """Whether a sign of life was given since the last call; None: there is nobody any more who could give one."""
    try:
        return True if os.read(fd, _READ_BYTES_MAX) else None
    except BlockingIOError:
        return False
