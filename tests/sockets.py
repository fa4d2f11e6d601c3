"""What tests ask of a plain socket, whatever is spoken over it."""

from __future__ import annotations

import socket

from fastcheck.local.ports import find_free_ports


def ends(sock: socket.socket, timeout_s: float = 30.0) -> bool:
    """Whether the other side closes within that time, or between two things that it says before."""
    sock.settimeout(timeout_s)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def free_port() -> int:
    """One on loopback that no connection is given meanwhile, nor another test."""
    return find_free_ports(1)[0]


def free_address() -> str:
    """The same as `host:port`."""
    return f"127.0.0.1:{free_port()}"
