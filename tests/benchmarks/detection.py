"""How soon a killed node is DOWN for everyone, how soon a lost leader's cluster commits again, and who is wronged.

What the others see is seen as they see it: each watches the registry as its node's data process does. Only processes
of the benchmark's own cluster are killed, and its burners. Run it alone: everything here is a matter of milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fastcheck import Checkpointer, FastCheckError
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.config_sources import load_config
from fastcheckd.counters import Counters
from fastcheckd.registry.client import RegistryClient

from .report import Figure

DEADLINE_S = 60.0
SOAK_NODES = 8
#: Of each kind of state, as the watchers see it change.
Seen = dict[str, tuple[int, int]]


class Watchers:
    """Every node's view of the cluster, each by a client of its own, in a thread of their own.

    Args:
        on_view: called in that thread with the watching node's id and each view.
    """

    def __init__(
        self, cluster: LocalCluster, on_view: Callable[[str, rpb.ClusterView], None] = lambda *_: None
    ) -> None:
        self._configs = {n: load_config(cluster.dir / n / "config.yaml") for n in cluster.node_ids}
        self._on_view = on_view
        #: Watching node → watched node → (state, incarnation), replaced as a whole.
        self._seen: dict[str, Seen] = {}
        #: When each watcher first saw (node, incarnation) DOWN.
        self._down_at: dict[tuple[str, str, int], float] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="watchers", daemon=True)

    def __enter__(self) -> Watchers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._watch_all())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        # Not closed: gRPC's poller may still have something to tell it.

    async def _watch_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for node_id in self._configs:
                group.create_task(self._watch(node_id))

    async def _watch(self, watcher: str) -> None:
        client = RegistryClient(self._configs[watcher], Counters())
        try:
            async for view in client.watch():
                now = time.monotonic()
                for node in view.nodes:
                    if node.state == rpb.NODE_STATE_DOWN:
                        self._down_at.setdefault((watcher, node.node_id, node.incarnation), now)
                self._seen[watcher] = {n.node_id: (n.state, n.incarnation) for n in view.nodes}
                self._on_view(watcher, view)
        finally:
            await client.close()

    def until_all_up(self) -> Seen:
        """Wait until every watcher sees every node UP, all in the same lives; these."""

        def agreed() -> Seen | None:
            views = list(self._seen.values())
            alike = len(views) == len(self._configs) and all(view == views[0] for view in views)
            well = alike and len(views[0]) == len(self._configs)
            return views[0] if well and {s for s, _ in views[0].values()} == {rpb.NODE_STATE_UP} else None

        found: Seen = _until(agreed, "every node to be UP for all")
        return found

    def until_down_for_all_but(self, node_id: str, incarnation: int) -> float:
        """Wait until all other nodes see that this life is over; when the last one saw it."""
        others = [n for n in self._configs if n != node_id]

        def seen() -> list[float] | None:
            at = [self._down_at.get((other, node_id, incarnation)) for other in others]
            return [t for t in at if t is not None] if None not in at else None

        return max(_until(seen, f"{node_id} to be DOWN for all others"))


def _until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.001)
    return value


def killed_nodes(cluster: LocalCluster, trials: int, say: Callable[[str], None]) -> list[float]:
    """Milliseconds from SIGKILL of a whole node, voters in their turn, until it is DOWN for all others."""
    taken_ms = []
    with Watchers(cluster) as watchers:
        for trial in range(trials):
            lives = watchers.until_all_up()
            victim = cluster.node_ids[trial % len(cluster.node_ids)]
            processes = [psutil.Process(pid) for pid in cluster.pids(victim)]
            started = time.monotonic()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):  # its parent's end was its own
                    process.kill()
            down_at = watchers.until_down_for_all_but(victim, lives[victim][1])
            taken_ms.append((down_at - started) * 1e3)
            say(f"{trial + 1}/{trials}: {victim} was DOWN for all others after {taken_ms[-1]:.0f} ms")
            cluster.kill(victim)
            cluster.start(victim)
    return taken_ms


def killed_leaders(cluster: LocalCluster, trials: int, say: Callable[[str], None]) -> list[float]:
    """Milliseconds from SIGKILL of the leader until a step that was saved after it is committed."""
    state = {"x": bytes(1 << 18)}
    taken_ms = []
    owner = cluster.node_ids[-1]  # no voter
    with (
        AdminClient(cluster.address(owner), timeout_s=5) as admin,
        Checkpointer("failover", rank=0, world_size=1, address=cluster.address(owner)) as checkpointer,
        Watchers(cluster) as watchers,
    ):

        def leader() -> str:
            with contextlib.suppress(FastCheckError):
                return str(admin.status()["leader"] or "")
            return ""

        for trial in range(trials):
            checkpointer.save(2 * trial + 1, state).result(timeout=DEADLINE_S)
            watchers.until_all_up()
            node_id = _until(leader, "a leader")
            registry = next(
                p for p in map(psutil.Process, cluster.pids(node_id)) if p.name() == "fcheck-registry"
            )
            started = time.monotonic()
            registry.kill()
            checkpointer.save(2 * trial + 2, state).result(timeout=DEADLINE_S)
            taken_ms.append((time.monotonic() - started) * 1e3)
            say(f"{trial + 1}/{trials}: without the leader {node_id}, committed after {taken_ms[-1]:.0f} ms")
            # It is to be a voter again before the next one is killed.
            _until(
                lambda old=registry.pid, node=node_id: _registry_pid(cluster, node) not in {None, old},
                "its restart",
            )
            time.sleep(2.0)  # for it to catch up, so that the next trial finds three voters
    return taken_ms


def _registry_pid(cluster: LocalCluster, node_id: str) -> int | None:
    for pid in cluster.pids(node_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name() == "fcheck-registry":
                return pid
    return None


def detection(trials: int, say: Callable[[str], None]) -> list[Figure]:
    """Both kinds of death."""
    with _cluster(4) as cluster:
        figures = _with_tail(
            "SIGKILL of a node until it is DOWN for all others", killed_nodes(cluster, trials, say)
        )
    with _cluster(4) as cluster:
        return figures + _with_tail(
            "leader killed until the next step is committed", killed_leaders(cluster, trials, say)
        )


def soak(minutes: float, say: Callable[[str], None], burners: int | None = None) -> list[Figure]:
    """Nobody is killed, and every core has something else to do: how often is somebody wronged?

    Args:
        burners: busy processes beside the cluster; None: two for every core, 0: something else keeps them busy.
    """
    states: dict[tuple[str, str], int] = {}
    counts = {rpb.NODE_STATE_DOWN: 0, rpb.NODE_STATE_SUSPECT: 0}
    lock = threading.Lock()

    def note(watcher: str, view: rpb.ClusterView) -> None:
        with lock:
            for node in view.nodes:
                before = states.get((watcher, node.node_id), rpb.NODE_STATE_UP)
                # What happened is the leader's doing; one watcher is enough to count it.
                if watcher == "node-0" and node.state != before and node.state in counts:
                    counts[node.state] += 1
                states[watcher, node.node_id] = node.state

    with _cluster(SOAK_NODES) as cluster, Watchers(cluster, note) as watchers:
        watchers.until_all_up()
        counts.update(dict.fromkeys(counts, 0))
        down_before = _times_down(cluster)
        with _burners(2 * (psutil.cpu_count() or 1) if burners is None else burners):
            end = time.monotonic() + minutes * 60
            while (left_s := end - time.monotonic()) > 0:
                say(
                    f"{left_s / 60:.1f} min left: {counts[rpb.NODE_STATE_DOWN]} DOWN, "
                    f"{counts[rpb.NODE_STATE_SUSPECT]} SUSPECT"
                )
                time.sleep(min(left_s, 30.0))
        # What a watcher may have missed, the registry remembers.
        down = _times_down(cluster) - down_before
        assert down >= counts[rpb.NODE_STATE_DOWN], "the history lacks what a watcher has seen"
    return [
        Figure(
            f"nodes called DOWN in {minutes:g} min of saturated cores",
            "times",
            [float(down)],
            goal="none",
        ),
        Figure("spells of SUSPECT in the same time", "times", [float(counts[rpb.NODE_STATE_SUSPECT])]),
    ]


def _times_down(cluster: LocalCluster) -> int:
    with AdminClient(cluster.address("node-0"), timeout_s=10) as admin:
        return sum(transition["to"] == "DOWN" for transition in admin.history()["transitions"])


def _with_tail(name: str, runs_ms: list[float]) -> list[Figure]:
    return [
        Figure(name, "ms", runs_ms),
        Figure(f"{name}, 99th percentile", "ms", [float(np.percentile(runs_ms, 99))]),
        Figure(f"{name}, worst", "ms", [max(runs_ms)]),
    ]


@contextlib.contextmanager
def _cluster(nodes: int) -> Iterator[LocalCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        LocalCluster(Path(folder)) as cluster,
    ):
        cluster.up(nodes, tolerate=1, ram_budget="64MiB")
        yield cluster


@contextlib.contextmanager
def _burners(count: int) -> Iterator[None]:
    """Busy processes."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()
