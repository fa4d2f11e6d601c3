"""Free ports for daemons that keep them across restarts.

They come from below the kernel's ephemeral range: a port in it may be taken by anybody's outgoing connection
while a killed node is down. "Free" is found by binding. Daemons bind seconds after that, so two clusters that come up
at the same moment would now and then be given the same port: who looks for ports takes turns, in a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

_HOST = "127.0.0.1"
_LOW, _HIGH = 10_000, 65_535
#: What Linux uses when nobody changed it.
_EPHEMERAL_DEFAULT = (32_768, 60_999)
_TURN_DIGITS_MAX = 18


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel hands out by itself."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _EPHEMERAL_DEFAULT


def candidate_ports(ephemeral: tuple[int, int]) -> list[int]:
    """Ports worth trying: outside the ephemeral range, or any above 10,000 when it leaves too few."""
    outside = [port for port in range(_LOW, _HIGH + 1) if not ephemeral[0] <= port <= ephemeral[1]]
    return outside if len(outside) >= 1000 else list(range(_LOW, _HIGH + 1))


def find_free_ports(count: int, avoid: frozenset[int] = frozenset()) -> list[int]:
    """Distinct ports of the loopback that nothing is bound to, and that were not handed out on this machine of late.

    Raises:
        OSError: there are not that many.
    """
    candidates = candidate_ports(ephemeral_range())
    tried: set[int] = set()
    found: list[int] = []
    with contextlib.closing(_turns()) as turns:
        while len(found) < count and len(tried) < len(candidates):
            port = candidates[next(turns) % len(candidates)]
            if port not in tried and port not in avoid and _is_free(port):
                found.append(port)
            tried.add(port)
    if len(found) < count:
        raise OSError(errno.EADDRINUSE, f"only {len(found)} of {count} ports are free on {_HOST}")
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _turns() -> Generator[int, None, None]:
    """Numbers that no other process of this user gets; where they cannot be kept, from a random one on."""
    path = Path(tempfile.gettempdir()) / f"fastcheck-ports-{os.getuid()}"
    try:
        kept = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError:
        yield from itertools.count(secrets.randbelow(_HIGH))
        return
    try:
        about = os.fstat(kept)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            yield from itertools.count(secrets.randbelow(_HIGH))
        while True:
            yield _next_turn(kept)
    finally:
        os.close(kept)


def _next_turn(kept: int) -> int:
    fcntl.flock(kept, fcntl.LOCK_EX)
    try:
        text = os.pread(kept, _TURN_DIGITS_MAX, 0)
        turn = int(text) if text.isdigit() else secrets.randbelow(_HIGH)
        os.pwrite(kept, str(turn + 1).encode(), 0)
    finally:
        fcntl.flock(kept, fcntl.LOCK_UN)
    return turn
