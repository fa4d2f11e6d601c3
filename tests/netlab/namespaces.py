"""Going into a network namespace, for processes that are forked and not started by `ip netns exec`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NAMESPACES = Path("/run/netns")
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2


def enter(namespace: str) -> None:
    """What `ip netns exec` does: its network is this process', and so is what /sys says of it.

    Raises:
        OSError: as root one may; otherwise not.
    """
    fd = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    try:
        _checked(_LIBC.setns(fd, _CLONE_NEWNET))
    finally:
        os.close(fd)
    _checked(_LIBC.unshare(_CLONE_NEWNS))
    _checked(_LIBC.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    _LIBC.umount2(b"/sys", _MNT_DETACH)  # where there is none, there is none to hide
    _checked(_LIBC.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
