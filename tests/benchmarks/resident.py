"""How much memory nodes take: the bytes of their RAM directories, and what their processes have besides.

Pages of the RAM directory that a process maps are counted once, in the directory. Pages of libraries are counted for
every process, though the kernel keeps them once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

_INTERVAL_S = 0.05
#: Of /proc/PID/status: memory of its own, and of files that are not on a tmpfs.
_OWN = ("RssAnon:", "RssFile:")


def directory_bytes(folder: Path) -> int:
    """Memory that the files of a folder take on a tmpfs; holes take none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # a segment that was just given up
    return total


def status_bytes(status: str) -> int:
    """Resident bytes, those of shared memory left out, from the text of /proc/PID/status."""
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(_OWN))


def processes_bytes(pids: Iterable[int]) -> int:
    """The same for several processes; one that ended takes none."""
    total = 0
    for pid in pids:
        try:
            total += status_bytes(Path(f"/proc/{pid}/status").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


class Sampler:
    """Looks at each node many times a second, for as long as it is open.

    Args:
        nodes: node → its RAM directory and its processes.
    """

    def __init__(self, nodes: Mapping[str, tuple[Path, list[int]]]) -> None:
        self._nodes = nodes
        self._highest = dict.fromkeys(nodes, 0)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def now_bytes(self) -> dict[str, int]:
        """Each node's memory at this moment."""
        return {
            node: directory_bytes(folder) + processes_bytes(pids)
            for node, (folder, pids) in self._nodes.items()
        }

    def directories_bytes(self) -> dict[str, int]:
        """Each node's RAM directory alone, at this moment."""
        return {node: directory_bytes(folder) for node, (folder, _) in self._nodes.items()}

    def highest_bytes(self) -> dict[str, int]:
        """The most that each node had whenever it was looked at."""
        with self._lock:
            return dict(self._highest)

    def _run(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            now = self.now_bytes()
            with self._lock:
                for node, value in now.items():
                    self._highest[node] = max(self._highest[node], value)
