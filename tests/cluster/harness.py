"""Jobs on real clusters, and how to look at and hurt a node: what the cluster tests have in common."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fastcheck import Checkpointer, DaemonUnavailableError, RegistryUnavailableError, SaveHandle
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster
from fastcheck_proto.v1 import store_pb2

DEADLINE_S = 60.0


def until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Wait for a condition; its value when it holds. A daemon that does not answer yet is none that says so."""
    deadline = time.monotonic() + timeout_s
    last = ""
    while True:
        try:
            if value := condition():
                return value
        except (DaemonUnavailableError, RegistryUnavailableError) as error:
            last = f"; last: {error}"
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s in vain for {what}{last}")
        time.sleep(0.05)


def make_state(seed: int, step: int, rank: int, megabytes: float = 1.0) -> dict[str, Any]:
    """A rank's state whose every bit follows from (seed, step, rank)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    count = max(1, int(megabytes * 262144) // 4)
    tensors = {f"layer{i}": torch.randn(count, generator=generator) for i in range(4)}
    return {"model": tensors, "bits": torch.randint(0, 2**31, (7,), generator=generator), "step": step}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found["step"] == wanted["step"]
    assert torch.equal(found["bits"], wanted["bits"])
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name].view(torch.int32), tensor.view(torch.int32)), name


class Job:
    """All ranks of a job, one per node unless said otherwise."""

    def __init__(
        self, cluster: LocalCluster, nodes: list[str], name: str = "gpt", megabytes: float = 1.0
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.megabytes = megabytes
        self.nodes = list(nodes)
        self.ranks: list[Checkpointer] = []
        self.start()

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def start(self, nodes: list[str] | None = None) -> None:
        """All trainers start anew, on other nodes if given."""
        self.stop()
        self.nodes = list(nodes or self.nodes)
        self.ranks = [self.trainer(rank) for rank in range(self.world_size)]

    def trainer(self, rank: int, node: str | None = None) -> Checkpointer:
        """One trainer process' Checkpointer."""
        address = self.cluster.address(node or self.nodes[rank])
        return Checkpointer(self.name, rank=rank, world_size=self.world_size, address=address)

    def state(self, step: int, rank: int) -> dict[str, Any]:
        return make_state(7, step, rank, self.megabytes)

    def save(self, step: int) -> list[SaveHandle]:
        """Every rank saves; returns without waiting for the commit."""
        return [ckpt.save(step, self.state(step, rank)) for rank, ckpt in enumerate(self.ranks)]

    def commit(self, step: int) -> None:
        """Every rank saves and the step is committed."""
        for handle in self.save(step):
            handle.result(timeout=DEADLINE_S)

    def load(self, step: int | None = None) -> int | None:
        """Every rank loads; all got the same step, bit for bit what that step saved."""
        loaded = set()
        for rank, ckpt in enumerate(self.ranks):
            state = make_state(99, 0, rank, self.megabytes)
            loaded.add(ckpt.load(state, step=step))
            if (got := next(iter(loaded))) is not None:
                assert_same(state, self.state(got, rank))
        assert len(loaded) == 1
        return loaded.pop()

    def stop(self) -> None:
        for ckpt in self.ranks:
            ckpt.close()
        self.ranks = []


class TimedJob:
    """One rank with a tiny state, whose commits are timed."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self._ckpt, self._step = ckpt, 0

    def commit_s(self) -> float:
        """Save one more step; how long its commit took."""
        self._step += 1
        began = time.perf_counter()
        self._ckpt.save(self._step, {"x": torch.full((1000,), float(self._step))}).result(timeout=DEADLINE_S)
        return time.perf_counter() - began

    def median_s(self) -> float:
        """The best of four medians of 15 commits each, since the machine has other work, too."""
        return min(statistics.median(self.commit_s() for _ in range(15)) for _ in range(4))

    def median_at_most_s(self, good_s: float) -> float:
        """The best median of 15 commits, of twelve such or of those up to the first that is no more than `good_s`."""
        best = float("inf")
        for _ in range(12):
            best = min(best, statistics.median(self.commit_s() for _ in range(15)))
            if best <= good_s:
                break
        return best


def counters(cluster: LocalCluster, node: str) -> dict[str, int]:
    """What the node's data process has counted."""
    with AdminClient(cluster.address(node), timeout_s=5) as admin:
        found: dict[str, int] = next(n for n in admin.nodes()["nodes"] if n["node_id"] == node)["counters"]
    return found


def node_states(cluster: LocalCluster, ask: str) -> dict[str, str]:
    """The registry's view of all nodes, asked through one of them."""
    with AdminClient(cluster.address(ask), timeout_s=5) as admin:
        return {n["node_id"]: n["state"] for n in admin.nodes()["nodes"]}


def leader(cluster: LocalCluster, ask: str) -> str:
    """Node id of the registry's leader; empty while there is none."""
    with AdminClient(cluster.address(ask), timeout_s=5) as admin:
        return str(admin.status()["leader"] or "")


def process_of(cluster: LocalCluster, node: str, kind: str) -> psutil.Process:
    """The node's `agent`, `data` or `registry` process."""
    for pid in cluster.pids(node):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name() == f"fcheck-{kind}":
                return process
    raise AssertionError(f"{node} has no {kind} process")


@contextlib.contextmanager
def paused(*processes: psutil.Process) -> Iterator[None]:
    """SIGSTOP for as long as the context lasts."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)


def run_module(module: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m module` with the sources that the tests use; exit code, stdout and stderr as text."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def replicas_on_disk(cluster: LocalCluster, node: str) -> list[Path]:
    """Manifest files in a node's RAM directory."""
    ram_dir = next(n["ram_dir"] for n in cluster.status()["nodes"] if n["node_id"] == node)
    return sorted(Path(ram_dir).glob("manifests/*/*.replica"))


def chunks_on_disk(manifest: Path) -> list[tuple[Path, int, int]]:
    """Where the chunks of the replica of a manifest lie, in order: file, offset and length in bytes."""
    stored = store_pb2.StoredReplica.FromString(manifest.read_bytes()[:-16])
    folder = manifest.parents[2] / "segments"
    own = len(stored.manifest.chunk_digests) // 16
    places = stored.places
    rows = zip(places.files[:own], places.offsets[:own], places.lengths[:own], strict=True)
    return [(folder / stored.files[file], offset, length) for file, offset, length in rows]


def flip_byte(path: Path, at: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
