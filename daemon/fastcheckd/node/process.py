"""What the processes share: how they are stopped, and how they listen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

from ..dialing import Dialer
from ..errors import ConfigError


def stop_signal() -> asyncio.Future[None]:
    """A future that SIGTERM or SIGINT completes."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopping.done():
            stopping.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


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
