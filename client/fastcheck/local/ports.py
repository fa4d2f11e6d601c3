"""Free ports for daemons that keep them across restarts.

They come from below the kernel's ephemeral range: a port in it may be taken by anybody's outgoing connection
while a killed node is down. "Free" is found by binding, with all sockets held until enough are found.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

_LOW, _HIGH = 10_000, 65_535
#: What Linux uses when nobody changed it.
_EPHEMERAL_DEFAULT = (32_768, 60_999)


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


def find_free_ports(count: int, host: str = "127.0.0.1", avoid: frozenset[int] = frozenset()) -> list[int]:
    """Distinct ports that nothing on `host` is bound to now.

    Raises:
        OSError: there are not that many.
    """
    candidates = [port for port in candidate_ports(ephemeral_range()) if port not in avoid]
    # A random start keeps clusters that come up at the same moment apart.
    random.shuffle(candidates)
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in candidates:
            if len(found) == count:
                break
            sock = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):  # taken: the next one
                sock.bind((host, port))
                found.append(port)
    if len(found) < count:
        raise OSError(errno.EADDRINUSE, f"only {len(found)} of {count} ports are free on {host}")
    return found
