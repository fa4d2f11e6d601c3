"""How long `fastcheck status` takes, its program's start included, with half of the nodes silent.

Silent is worse than dead: a killed process refuses connections, a machine without power says nothing. So nodes are
frozen (SIGSTOP), and asked about twice: at once, while the registry still holds them UP, and when they are DOWN.
Only processes of the benchmark's own cluster are frozen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fastcheck import Checkpointer, FastCheckError
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

from .report import Figure

NODES = 8
#: Asked is a node that votes not, like most.
ASKED = "node-7"
#: Of the three voters one, so that there is a quorum; or two, so that there is none.
WITH_QUORUM = ("node-2", "node-4", "node-5", "node-6")
WITHOUT_QUORUM = ("node-1", "node-2", "node-5", "node-6")
GOAL = "under 2000 ms"
DEADLINE_S = 60.0


def measure(rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """All rows."""
    runs: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        LocalCluster(Path(folder)) as cluster,
    ):
        cluster.up(NODES, tolerate=1, ram_budget="64MiB")
        with Checkpointer("bench", rank=0, world_size=1, address=cluster.address("node-0")) as checkpointer:
            checkpointer.save(1, {"x": bytes(1 << 20)}).result(timeout=DEADLINE_S)
        with AdminClient(cluster.address(ASKED), timeout_s=5) as admin:

            def ask(name: str, wanted: Sequence[int]) -> None:
                took_ms, code = _timed(cluster)
                assert code in wanted, f"{name}: exit code {code}"
                runs.setdefault(name, []).append(took_ms)
                say(f"{name}: {took_ms:.0f} ms, exit code {code}")

            for _ in range(rounds):
                _until(lambda: _up(admin) == NODES, "all nodes to be UP")
                ask("all nodes there", (0, 5))
                with _frozen(cluster, WITH_QUORUM):
                    ask("half silent, and not DOWN yet", (0, 4, 5))
                    _until(lambda: _up(admin) == NODES - len(WITH_QUORUM), "half to be DOWN")
                    ask("half DOWN", (5,))
            for _ in range(rounds):
                _until(lambda: _up(admin) == NODES, "all nodes to be UP")
                with _frozen(cluster, WITHOUT_QUORUM):
                    ask("half silent, most voters among them", (0, 4, 5))
                    _until(lambda: admin.status()["health"] == "CRITICAL", "no quorum")
                    ask("half silent, no quorum", (4,))
    return [Figure(f"fastcheck status, {name}", "ms", taken, goal=GOAL) for name, taken in runs.items()]


def _timed(cluster: LocalCluster) -> tuple[float, int]:
    command = [sys.executable, "-m", "fastcheck", "status", "-o", "json", "--address", cluster.address(ASKED)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    return (time.perf_counter() - started) * 1e3, done.returncode


@contextlib.contextmanager
def _frozen(cluster: LocalCluster, nodes: Sequence[str]) -> Iterator[None]:
    pids = [pid for node in nodes for pid in cluster.pids(node)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _up(admin: AdminClient) -> int:
    return sum(node["state"] == "UP" and node["reachable"] for node in admin.nodes()["nodes"])


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(FastCheckError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:g} s in vain for {what}")
        time.sleep(0.05)
