"""What a node costs the registry's leader, from a hundred simulated ones, and what a thousand and ten thousand would.

Three real voters, one real `fastcheckd`, and processes full of simulated nodes that send heartbeats and watch the view
over real gRPC. The leader's CPU is taken at two sizes, idle and while steps are committed; the differences are the unit
costs. The larger sizes are arithmetic with these, printed with its terms; nobody has run them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.cluster.registry_actors import Node, Rank, connected, eventually
from tests.cluster.registry_process import ROOT, RegistryCluster, free_ports

from fastcheck_proto.v1 import registry_pb2
from fastcheckd.config import Config
from fastcheckd.registry.client import RegistryClient

from .report import Figure

NODES_PER_PROCESS = 25
SETTLE_S = 5.0
START_S = 120.0
#: Commits per second while they are measured: a large cluster with several jobs.
COMMITS_PER_S = 5.0
LARGER = (1_000, 10_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What was measured with so many nodes."""

    nodes: int
    #: Shares of a core.
    leader_idle: float
    leader_committing: float
    agent_idle: float
    commits_per_s: float
    commit_ms: Sequence[float]
    view_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """The leader's, from two sizes. Seconds of CPU."""

    per_heartbeat_s: float
    #: A change of the view, encoded and sent to one watcher.
    per_watcher_and_change_s: float
    #: What is there with no node at all, as a share of a core.
    base: float
    view_bytes_per_node: float
    heartbeats_per_node_and_s: float

    def at(self, nodes: int, changes_per_s: float) -> dict[str, float]:
        """The leader's load with so many nodes, each watching once. What a view costs grows with its nodes."""
        heartbeats_per_s = nodes * self.heartbeats_per_node_and_s
        view_bytes = nodes * self.view_bytes_per_node
        return {
            "heartbeats_per_s": heartbeats_per_s,
            "heartbeat_cores": heartbeats_per_s * self.per_heartbeat_s,
            "view_bytes": view_bytes,
            "fan_out_bytes_per_s": view_bytes * nodes * changes_per_s,
            "fan_out_cores": nodes * changes_per_s * self.per_watcher_and_change_s,
        }


def unit_costs(small: Size, large: Size, heartbeat_interval_s: float) -> UnitCosts:
    """Costs per piece from the difference of two sizes. Pure."""
    more = large.nodes - small.nodes
    per_s = 1 / heartbeat_interval_s
    per_heartbeat_s = max(0.0, large.leader_idle - small.leader_idle) / (more * per_s)
    committing = [
        max(0.0, size.leader_committing - size.leader_idle) / size.commits_per_s for size in (small, large)
    ]
    return UnitCosts(
        per_heartbeat_s=per_heartbeat_s,
        per_watcher_and_change_s=max(0.0, committing[1] - committing[0]) / more,
        base=max(0.0, small.leader_idle - small.nodes * per_s * per_heartbeat_s),
        view_bytes_per_node=(large.view_bytes - small.view_bytes) / more,
        heartbeats_per_node_and_s=per_s,
    )


def scale(nodes: int, seconds: float, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Measure with a tenth of the nodes and with all of them; figures for the table, and everything else."""
    sizes = []
    for count in (max(2, nodes // 10), nodes):
        say(f"{count} simulated nodes")
        sizes.append(asyncio.run(_measure(count, seconds)))
    small, large = sizes
    interval_s = Config().heartbeat_interval_s
    units = unit_costs(small, large, interval_s)
    for line in arithmetic(units):
        print(line)
    figures = []
    for size in sizes:
        name = f"{size.nodes} nodes"
        figures += [
            Figure(f"registry leader, {name}, heartbeats alone", "% of a core", [size.leader_idle * 100]),
            Figure(
                f"registry leader, {name}, {size.commits_per_s:.1f} commits/s",
                "% of a core",
                [size.leader_committing * 100],
            ),
            Figure(f"agent, {name}", "% of a core", [size.agent_idle * 100]),
            Figure(f"commit (place, report), {name}", "ms", size.commit_ms),
        ]
    more = {str(n): units.at(n, 1.0) for n in LARGER}
    return figures, {
        "sizes": [dataclasses.asdict(size) for size in sizes],
        "units": dataclasses.asdict(units),
        "computed": more,
    }


def arithmetic(units: UnitCosts) -> Iterator[str]:
    """The larger sizes, term by term."""
    yield (
        f"unit costs at the leader: {units.per_heartbeat_s * 1e6:.1f} us per heartbeat, "
        f"{units.per_watcher_and_change_s * 1e6:.1f} us per watcher and change, "
        f"{units.view_bytes_per_node:.0f} bytes of view per node, {units.base * 100:.1f} % of a core without nodes"
    )
    for nodes in LARGER:
        found = units.at(nodes, 1.0)
        yield (
            f"computed, not run, {nodes} nodes: {found['heartbeats_per_s']:.0f} heartbeats/s x "
            f"{units.per_heartbeat_s * 1e6:.1f} us = {found['heartbeat_cores']:.2f} cores; a view of "
            f"{found['view_bytes'] / 1e3:.0f} kB x {nodes} watchers = "
            f"{found['fan_out_bytes_per_s'] / 1e6:.0f} MB per change, at least "
            f"{found['fan_out_cores']:.2f} cores at one change per second (a view's cost grows with its size)"
        )


async def _measure(count: int, seconds: float) -> Size:
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        _registry(Path(folder)) as registry,
    ):
        async with connected(registry.config) as client:
            leader = await eventually(lambda: _leader(client), START_S, "a leader")
            with _simulated(Path(folder), registry, count), _real_agent(Path(folder), registry) as agent:
                await eventually(lambda: _known(client, count + 1), START_S, "all nodes")
                owner = await Node(registry.config, "owner").start(client)
                rank = Rank(client, owner, 0, 1)
                await rank.open("bench")
                await rank.save(1)
                await asyncio.sleep(SETTLE_S)  # registrations make views of their own
                process = psutil.Process(registry.processes[leader].pid)
                before, agent_before, started = _cpu_s(process), _cpu_s(agent), time.monotonic()
                await asyncio.sleep(seconds)
                took_s = time.monotonic() - started
                idle, agent_idle = (
                    (_cpu_s(process) - before) / took_s,
                    (_cpu_s(agent) - agent_before) / took_s,
                )
                before, started, commit_ms = _cpu_s(process), time.monotonic(), []
                while (took_s := time.monotonic() - started) < seconds:
                    began = time.perf_counter()
                    answer = await rank.save(2 + len(commit_ms))
                    assert answer.state == registry_pb2.REPORT_STATE_COMMITTED, answer
                    commit_ms.append((time.perf_counter() - began) * 1e3)
                    await asyncio.sleep(
                        max(0.0, len(commit_ms) / COMMITS_PER_S - (time.monotonic() - started))
                    )
                committing = (_cpu_s(process) - before) / took_s
                view = await client.view(10)
                assert view.leader == leader, "the leader has changed, so the figures are of nobody"
                await owner.stop()
    return Size(
        nodes=count,
        leader_idle=idle,
        leader_committing=committing,
        agent_idle=agent_idle,
        commits_per_s=len(commit_ms) / took_s,
        commit_ms=commit_ms,
        view_bytes=view.ByteSize(),
    )


async def _leader(client: RegistryClient) -> str:
    return (await client.view(10)).leader


async def _known(client: RegistryClient, count: int) -> bool:
    nodes = (await client.view(10)).nodes
    return sum(node.state == registry_pb2.NODE_STATE_UP for node in nodes) >= count


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _registry(folder: Path) -> Iterator[RegistryCluster]:
    registry = RegistryCluster(folder, 3)
    try:
        registry.start_all()
        yield registry
    finally:
        registry.stop_all()


@contextlib.contextmanager
def _simulated(folder: Path, registry: RegistryCluster, count: int) -> Iterator[None]:
    """So many nodes, in as few processes as can keep up with them."""
    config = folder / "simulated.json"
    keys = {key: value for key, value in dataclasses.asdict(registry.config).items() if value is not None}
    config.write_text(json.dumps(keys, default=str))
    processes = []
    try:
        for first in range(0, count, NODES_PER_PROCESS):
            numbers = [str(first), str(min(NODES_PER_PROCESS, count - first))]
            command = [sys.executable, "-m", "tests.benchmarks.scale_nodes", str(config), *numbers]
            started = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(started)
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"simulated nodes have ended with exit code {process.wait(10)}")
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def _real_agent(folder: Path, registry: RegistryCluster) -> Iterator[psutil.Process]:
    """A whole node of the same cluster; its agent."""
    agent, data, lane = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="fastcheck-bench-", dir=_shm()) as ram_dir:
        config = {
            "cluster_id": registry.config.cluster_id,
            "node_id": "real",
            "agent_port": agent,
            "data_port": data,
            "lane_port": lane,
            "metrics_address": "",
            "voters": [dataclasses.asdict(voter) for voter in registry.voters],
            "raft_key_file": str(registry.config.raft_key_file),
            "runtime_dir": str(folder / "run"),
            "state_dir": str(folder / "real"),
            "ram_dir": ram_dir,
            "ram_budget_bytes": "64MiB",
        }
        (folder / "real.json").write_text(json.dumps(config))  # JSON is YAML
        with (folder / "real.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fastcheckd", "run", "--config", str(folder / "real.json")],
                cwd=ROOT, env=_environment(), stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FASTCHECK_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("daemon", "client", "proto", "."))
    }


def _shm() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
