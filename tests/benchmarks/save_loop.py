"""A plain loop of `save; result()` as users write it, on a cluster with its defaults; every step counts.

It answers what a training engineer asks first: how long `save` blocks, how long a step takes to be safe, the worst of
thirty steps of both, and how much memory a node takes at most, all included.

`python -m tests.benchmarks --only loop`; other sizes: `python -m tests.benchmarks.save_loop --steps 30
--width 768`.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from fastcheck import Checkpointer, OutOfMemoryError
from fastcheck.copier import default_copy_threads
from fastcheck.local import LocalCluster

from .limits import FreshCopy, Memcpy
from .report import Figure, print_table
from .resident import Sampler
from .workload import change, gpt2_state, state_bytes

#: What is judged begins after so many steps: the first ones meet memory that was never used.
WARM_UP = 2
SMALL_BYTES = 1 << 20
RESULT_TIMEOUT_S = 300.0


def save_loop(steps: int = 30, width: int = 768) -> list[Figure]:
    """Every row of the loop; needs about 16 GB at the default width."""
    figures: list[Figure] = []
    state = gpt2_state(width=width)
    memcpy = Memcpy(state_bytes(state))
    for threads in (1, default_copy_threads()):
        with _three_nodes() as cluster:
            figures += _loop(cluster, state, memcpy, steps, threads)
    for prepared in (True, False):
        figures.append(_first_saves(state, max(3, steps // 6), prepared=prepared))
    with _three_nodes() as cluster:
        figures.append(_many_tensors(cluster, steps, state_bytes(state) // 2))
    with _three_nodes() as cluster:
        figures.append(_small(cluster, steps))
        figures.append(_refusals(cluster))
    return figures


@contextlib.contextmanager
def _three_nodes(**settings: Any) -> Iterator[LocalCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        LocalCluster(Path(folder)) as cluster,
    ):
        cluster.up(3, tolerate=1, **settings)
        yield cluster


def _loop(
    cluster: LocalCluster, state: dict[str, Any], memcpy: Memcpy, steps: int, threads: int
) -> list[Figure]:
    size = state_bytes(state)
    nodes = {
        node["node_id"]: (Path(node["ram_dir"]), list(node["pids"])) for node in cluster.status()["nodes"]
    }
    blocked: list[float] = []
    committed: list[float] = []
    limits: list[float] = []
    address = cluster.address("node-0")
    with (
        Sampler(nodes) as sampler,
        Checkpointer(
            "loop", rank=0, world_size=1, address=address, copy_threads=threads, timeout_s=300
        ) as ckpt,
    ):
        for step in range(1, steps + WARM_UP + 1):
            change(state)
            limit_ms = memcpy.run() * 1e3
            started = time.monotonic()
            handle = ckpt.save(step, state)
            returned = time.monotonic()
            handle.result(timeout=RESULT_TIMEOUT_S)
            blocked.append((returned - started) * 1e3)
            committed.append((time.monotonic() - started) * 1e3)
            limits.append(limit_ms)
        highest = max(sampler.highest_bytes().values()) / size
    warm, safe, limit = blocked[WARM_UP:], committed[WARM_UP:], limits[WARM_UP:]
    memcpy_ms = statistics.median(limit)
    goal = "ratio <= 1.03" if threads == 1 else "ratio <= 0.75"
    of = "memcpy, 1 thread"
    return [
        Figure(f"save blocks, copy threads {threads}", "ms", warm, limit, of, goal),
        Figure(
            f"save blocks, copy threads {threads}, worst step / memcpy", "x", [max(warm) / memcpy_ms], goal="<= 1.5"
        ),
        Figure(f"first save, copy threads {threads}", "ms", blocked[:1], limits[:1], of),
        Figure(f"committed, copy threads {threads}", "ms", safe, limit, of, "ratio <= 5"),
        Figure(
            f"committed, copy threads {threads}, worst step / median", "x",
            [max(safe) / statistics.median(safe)], goal="<= 1.5",
        ),
        Figure(f"memory of a node, copy threads {threads}, highest / state", "x", [highest], goal="<= 4.3"),
    ]  # fmt: skip


def _small(cluster: LocalCluster, steps: int) -> Figure:
    """A state of 1 MB: what a save takes beyond the copy itself."""
    state = {"w": gpt2_state(width=8)["model"]["wte"].new_zeros(SMALL_BYTES // 4)}
    memcpy = Memcpy(SMALL_BYTES)
    runs, limits = [], []
    with Checkpointer("small", rank=0, world_size=1, address=cluster.address("node-0"), timeout_s=60) as ckpt:
        for step in range(1, steps + WARM_UP + 1):
            change(state)
            limit_ms = memcpy.run() * 1e3
            started = time.monotonic()
            handle = ckpt.save(step, state)
            runs.append((time.monotonic() - started) * 1e3 - limit_ms)
            limits.append(limit_ms)
            handle.result(timeout=RESULT_TIMEOUT_S)
    return Figure("save of 1 MB beyond the copy", "ms", runs[WARM_UP:], goal="<= 2")


def _first_saves(state: dict[str, Any], clusters: int, *, prepared: bool) -> Figure:
    """The first save of a job in a new cluster, once per cluster, next to a copy into untouched memory."""
    fresh = FreshCopy(state_bytes(state))
    runs, limits = [], []
    for _ in range(clusters):
        with (
            _three_nodes() as cluster,
            Checkpointer(
                "first",
                rank=0,
                world_size=1,
                address=cluster.address("node-0"),
                copy_threads=1,
                timeout_s=300,
            ) as ckpt,
        ):
            limits.append(fresh.run() * 1e3)
            if prepared:
                ckpt.prepare(state)
            started = time.monotonic()
            handle = ckpt.save(1, state)
            runs.append((time.monotonic() - started) * 1e3)
            handle.result(timeout=RESULT_TIMEOUT_S)
    name = f"first save, {'after prepare' if prepared else 'without prepare'}, copy threads 1"
    goal = f"ratio <= {1.2 if prepared else 2}"
    return Figure(name, "ms", runs, limits, "copy into fresh memory, 1 thread", goal)


def _many_tensors(cluster: LocalCluster, steps: int, size: int) -> Figure:
    """As many bytes in 10,000 tensors as in 40, saved in turns by two jobs."""
    runs: dict[int, list[float]] = {10_000: [], 40: []}
    states = {count: {f"t{i}": torch.ones(size // count // 4) for i in range(count)} for count in runs}
    with contextlib.ExitStack() as stack:
        ranks = {
            count: stack.enter_context(
                Checkpointer(
                    f"tensors-{count}", rank=0, world_size=1, address=cluster.address(node), timeout_s=300
                )
            )
            for count, node in zip(runs, ("node-0", "node-1"), strict=True)
        }
        for step in range(1, steps + WARM_UP + 1):
            for count, state in states.items():
                for tensor in state.values():
                    tensor.add_(1.0)
                started = time.monotonic()
                handle = ranks[count].save(step, state)
                if step > WARM_UP:
                    runs[count].append((time.monotonic() - started) * 1e3)
                handle.result(timeout=RESULT_TIMEOUT_S)
    return Figure(
        f"save blocks, 10,000 tensors of {size // 10_000 / 1e3:.0f} kB", "ms", runs[10_000], runs[40],
        "the same bytes in 40 tensors", "ratio <= 2",
    )  # fmt: skip


def _refusals(cluster: LocalCluster) -> Figure:
    """How soon `prepare` says that a job does not fit: its state alone takes what the node may have."""
    runs = []
    state = {"w": torch.empty(psutil.virtual_memory().total // 2 // 3 // 4)}
    for number in range(5):
        with Checkpointer(
            f"refused-{number}", rank=0, world_size=1, address=cluster.address("node-0"), timeout_s=60
        ) as ckpt:
            started = time.monotonic()
            try:
                ckpt.prepare(state)
            except OutOfMemoryError:
                runs.append(time.monotonic() - started)
            else:
                raise RuntimeError("a job that does not fit was not refused")
    return Figure("a job that does not fit is refused", "s", runs, goal="<= 2")


def main() -> None:
    """The table by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=768, help="of the model; 768 is GPT-2 124M, 1.49 GB")
    arguments = parser.parse_args()
    print_table(save_loop(arguments.steps, arguments.width))


if __name__ == "__main__":
    main()
