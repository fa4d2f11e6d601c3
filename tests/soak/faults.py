"""The faults that fall. Each is real, and over when its function returns; where it fell is drawn from the seed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fastcheck.local import LocalCluster, LocalClusterError

VOTERS = ("node-0", "node-1", "node-2")


class Cluster:
    """The soak's cluster: each node's memory is a small tmpfs of its own, where mounting is allowed."""

    def __init__(
        self, local: LocalCluster, nodes: int, ram_budget_bytes: int, settings: dict[str, object]
    ) -> None:
        self.local = local
        local.up(nodes, ram_budget=ram_budget_bytes, settings=settings)
        self.names = local.node_ids
        self.ram_dirs = {n["node_id"]: Path(n["ram_dir"]) for n in local.status()["nodes"]}
        self._mounted: list[Path] = []
        #: Whether a node's memory can be filled without filling the machine's.
        self.can_fill = os.geteuid() == 0
        for name in self.names if self.can_fill else ():
            self._mount(name, 2 * ram_budget_bytes)

    def _mount(self, name: str, size: int) -> None:
        ram_dir = self.ram_dirs[name]
        self.local.kill(name, wipe=True)
        ram_dir.mkdir(mode=0o700, parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(ram_dir)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            self.can_fill = False
        else:
            self._mounted.append(ram_dir)
        self.local.start(name)

    def close(self) -> None:
        """After the nodes are down."""
        for ram_dir in self._mounted:
            subprocess.run(["umount", "--lazy", str(ram_dir)], check=False)

    def process(self, node: str, kind: str) -> psutil.Process | None:
        """A node's `parent`, `agent`, `data` or `registry` process, if it runs."""
        pids = self.local.pids(node)
        if kind == "parent":
            return psutil.Process(pids[0]) if pids else None
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.name() == f"fcheck-{kind}":
                    return process
        return None

    def kill(self, node: str, *, wipe: bool) -> None:
        """As a power cut: all of a node's processes, and its memory."""
        self.local.kill(node)
        if wipe:
            for path in self.ram_dirs[node].iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def start(self, node: str) -> None:
        """Start it; that it is UP is waited for elsewhere."""
        with contextlib.suppress(LocalClusterError):
            self.local.start(node, timeout_s=0.1)


class Faults:
    """What may happen, each with its weight. `fall` does one and returns its name."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self._cluster = cluster
        self._draw = draw
        kinds: list[tuple[int, Callable[[], str]]] = [
            (3, self._kill_process),
            (3, self._stop_process),
            (1, self._kill_all_voters),
            (1, self._restart_node),
            (1, self._flip_journal),
        ]
        if cluster.can_fill:
            kinds.append((2, self._fill_memory))
        self._kinds = kinds

    def fall(self) -> str:
        """One of those after which no byte of memory is lost."""
        weights = [weight for weight, _ in self._kinds]
        ((_, fault),) = self._draw.choices(self._kinds, weights)
        return fault()

    def _node(self) -> str:
        return self._draw.choice(self._cluster.names)

    def _victim(self) -> tuple[str, str]:
        kind = self._draw.choice(("parent", "agent", "data", "registry"))
        return self._draw.choice(VOTERS if kind == "registry" else self._cluster.names), kind

    def _kill_process(self) -> str:
        node, kind = self._victim()
        if (process := self._cluster.process(node, kind)) is not None:
            process.kill()
        if kind == "parent":  # on a real machine its service manager starts it again
            self._cluster.local.kill(node)
            self._cluster.start(node)
        return f"SIGKILL {kind}"

    def _stop_process(self) -> str:
        node, kind = self._victim()
        process = self._cluster.process(node, kind)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                time.sleep(self._draw.uniform(0.1, 3.0))  # how long it is stopped is drawn
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        return f"SIGSTOP {kind}"

    def _kill_all_voters(self) -> str:
        found = [self._cluster.process(node, "registry") for node in VOTERS]
        for process in found:
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return "SIGKILL all voters"

    def _restart_node(self) -> str:
        node = self._node()
        self._cluster.kill(node, wipe=False)
        time.sleep(self._draw.uniform(0, 2))  # how long it is away is drawn
        self._cluster.start(node)
        return "restart node"

    def _fill_memory(self) -> str:
        filler = self._cluster.ram_dirs[self._node()] / "filler"
        try:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
            time.sleep(self._draw.uniform(0.5, 4))  # how long it is full is drawn
        finally:
            filler.unlink(missing_ok=True)
        return "fill memory"

    def _flip_journal(self) -> str:
        """A byte of the log is another when a voter starts. Later it is put right, as from a mirror."""
        node = self._draw.choice(VOTERS)
        self._cluster.local.kill(node)
        journal = self._cluster.local.dir / node / "state" / "registry" / "journal"
        if journal.exists() and (size := journal.stat().st_size) > 4096:
            at = self._draw.randrange(size // 2)
            _flip(journal, at)
            self._cluster.start(node)
            time.sleep(1.0)  # it starts, and refuses to go by it
            self._cluster.local.kill(node)
            _flip(journal, at)
        self._cluster.start(node)
        return "flip journal"

    def lose_node(self, node: str) -> str:
        """A machine is gone with all that it held, and comes back empty."""
        self._cluster.kill(node, wipe=True)
        time.sleep(self._draw.uniform(0, 2))  # how long it is away is drawn
        self._cluster.start(node)
        return "lose node"

    def flip_replica(self, node: str) -> str:
        """A byte of a holder's memory is another; `node` has no trainer, so nothing there is being filled by one."""
        segments = sorted(self._cluster.ram_dirs[node].glob("segments/*"))
        if segments:
            with contextlib.suppress(OSError):
                path = self._draw.choice(segments)
                _flip(path, self._draw.randrange(path.stat().st_size))
        return "flip replica"


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))
