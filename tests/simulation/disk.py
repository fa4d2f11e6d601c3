"""A voter's disk: it may be full, slow, stop in the middle of a write, and lose what was not synced.

`Disk` as the daemon describes it. What is there outlives processes; a power cut leaves what was synced, and of the rest
whatever it likes.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.virtual_time import Killed

BLOCK_BYTES = 64


@dataclass
class File:
    """Content, how much of it from the beginning is durable, and what was durable before it was cut."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0
    before: bytes | None = None


class Platter:
    """A machine's disk."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.files: dict[str, File] = {}
        self.full = False
        #: How long a sync takes.
        self.sync_s = 0.0

    def cut_power(self) -> None:
        for file in self.files.values():
            rng = self.rng
            if file.before is not None and rng.random() < 0.5:
                file.data = bytearray(file.before)
            else:
                tail = file.data[file.synced :]
                kind = rng.random()
                if kind < 0.3:
                    del tail[:]
                elif kind < 0.6:
                    del tail[rng.randrange(len(tail) + 1) :]
                elif kind < 0.8:
                    for at in range(0, len(tail), BLOCK_BYTES):
                        if rng.random() < 0.5:
                            end = min(at + BLOCK_BYTES, len(tail))
                            tail[at:end] = bytes(end - at)
                file.data[file.synced :] = tail
            file.synced, file.before = len(file.data), None


class SimulatedDisk:
    """A process' way to its machine's disk.

    Args:
        step: called before every operation; does not return once the process is no more.
        spend: told how long the process has to wait for one.
    """

    def __init__(self, platter: Platter, step: Callable[[], None], spend: Callable[[float], None]) -> None:
        self._platter = platter
        self._files = platter.files
        self._step = step
        self._spend = spend

    def path(self, name: str) -> str:
        return name

    def exists(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> bytes:
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return bytes(self._files[name].data)

    def append(self, name: str, data: bytes) -> None:
        file = self._files[name]
        try:
            self._step()
            self._check_room()
        except (Killed, OSError) as error:
            if not isinstance(error, Killed) or error.just_now:
                file.data += data[: self._platter.rng.randrange(len(data))]
            raise
        file.data += data

    def truncate(self, name: str, size: int) -> None:
        self._step()
        file = self._files[name]
        if size < file.synced:
            if file.before is None:
                file.before = bytes(file.data[: file.synced])
            file.synced = size
        del file.data[size:]

    def sync(self, name: str) -> None:
        self._step()
        self._spend(self._platter.sync_s)
        file = self._files[name]
        file.synced, file.before = len(file.data), None

    def replace(self, name: str, data: bytes) -> None:
        try:
            self._step()
        except Killed as killed:
            if killed.just_now and self._platter.rng.random() < 0.5:
                self._files[name] = File(bytearray(data), len(data))
            raise
        self._check_room()
        self._spend(self._platter.sync_s)
        self._files[name] = File(bytearray(data), len(data))

    def remove(self, name: str) -> None:
        self._step()
        self._files.pop(name, None)

    def close(self) -> None:
        pass

    def _check_room(self) -> None:
        if self._platter.full:
            raise OSError(errno.ENOSPC, "No space left on device")
