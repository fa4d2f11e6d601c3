"""What staging costs a trainer: plain and lazy saves, the first one, many small tensors. Limits in the same rounds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fastcheck import Checkpointer
from fastcheck.copying import default_copy_threads
from fastcheck.local import LocalCluster

from .limits import Memcpy
from .report import Figure
from .workload import change, gpt2_state, state_bytes

#: Saves before the measured ones: the first ones touch fresh memory.
_WARM_UP = 3
_SETTLE_S = 60


def measure(rounds: int, quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """All rows of staging."""
    rounds = 1 if quick else rounds
    state = _even_state(40, 30_000_000) if quick else gpt2_state()
    return [
        *_threads(state, rounds, say),
        *_first(state, rounds, say),
        *_many_small(60_000_000 if quick else 750_000_000, rounds, say),
        *_lazy(5 if quick else 40, rounds, say, width=256 if quick else 1024),
    ]


@contextmanager
def _cluster(size_bytes: int) -> Iterator[LocalCluster]:
    """One holder, and room for every step that may be kept or under way."""
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        LocalCluster(Path(folder)) as cluster,
    ):
        cluster.up(2, tolerate=1, ram_budget=f"{max(256, 5 * size_bytes >> 20)}MiB")
        yield cluster


def _trainer(cluster: LocalCluster, job: str, threads: int | None = None) -> Checkpointer:
    return Checkpointer(
        job, rank=0, world_size=1, address=cluster.address("node-0"), copy_threads=threads, timeout_s=300
    )


def _save_ms(ckpt: Checkpointer, step: int, state: Any) -> float:
    handle = ckpt.save(step, state)
    handle.result(timeout=300)
    return float(handle.stats["blocked_s"]) * 1e3


def _threads(state: Any, rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """One copying thread, and as many as cores are idle."""
    figures = []
    memcpy = Memcpy(state_bytes(state))
    for threads, goal in ((1, "ratio <= 1.03"), (default_copy_threads(), "ratio <= 0.75")):
        runs, limits = [], []
        with _cluster(state_bytes(state)) as cluster, _trainer(cluster, "threads", threads) as ckpt:
            for step in range(1, _WARM_UP + rounds + 1):
                change(state)
                limit_ms = memcpy.run() * 1e3
                blocked_ms = _save_ms(ckpt, step, state)
                say(f"save, copy threads {threads}: {blocked_ms:.0f} ms, memcpy {limit_ms:.0f} ms")
                if step > _WARM_UP:
                    runs.append(blocked_ms)
                    limits.append(limit_ms)
        figures.append(
            Figure(f"save blocks, copy threads: {threads}", "ms", runs, limits, "memcpy, 1 thread", goal)
        )
    return figures


def _first(state: Any, rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """The first save of a job, on a cluster that has none of its memory: prepared and not."""
    memcpy = Memcpy(state_bytes(state))
    figures = []
    for prepared in (False, True):
        runs, limits = [], []
        for _ in range(max(1, rounds // 3)):
            with _cluster(state_bytes(state)) as cluster, _trainer(cluster, "first") as ckpt:
                ckpt.steps()
                if prepared:
                    ckpt.prepare(state)
                    _until_warm(ckpt)
                limits.append(memcpy.run() * 1e3)
                runs.append(_save_ms(ckpt, 1, state))
                say(f"first save, prepared {prepared}: {runs[-1]:.0f} ms, memcpy {limits[-1]:.0f} ms")
        name = "first save blocks, after prepare" if prepared else "first save blocks"
        goal = "ratio <= 2" if prepared else ""
        figures.append(Figure(name, "ms", runs, limits, "memcpy, 1 thread", goal))
    return figures


def _until_warm(ckpt: Checkpointer) -> None:
    """What training would take longer for than this; the SDK itself never waits for it."""
    deadline = time.monotonic() + _SETTLE_S
    segments = ckpt._transport._cache._segments  # type: ignore[attr-defined]
    while not all(segment.warm for segment in segments.values()):
        if time.monotonic() > deadline:
            raise RuntimeError("the prepared memory did not become warm")
        time.sleep(0.01)


def _even_state(tensors: int, size_bytes: int) -> dict[str, Any]:
    """So many equal tensors of so many bytes together."""
    return {"t": {str(i): torch.randn(size_bytes // 4 // tensors) for i in range(tensors)}}


def _many_small(size_bytes: int, rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """The same bytes in 10,000 tensors and in 40, in turn."""
    states = {tensors: _even_state(tensors, size_bytes) for tensors in (40, 10_000)}
    runs: dict[int, list[float]] = {tensors: [] for tensors in states}
    with _cluster(2 * size_bytes) as cluster, ExitStack() as stack:
        trainers = {t: stack.enter_context(_trainer(cluster, f"tensors-{t}")) for t in states}
        for step in range(1, _WARM_UP + rounds + 1):
            for tensors, state in states.items():
                change(state)
                blocked_ms = _save_ms(trainers[tensors], step, state)
                say(f"save of {tensors} tensors: {blocked_ms:.0f} ms")
                if step > _WARM_UP:
                    runs[tensors].append(blocked_ms)
    return [
        Figure(
            "save of 10,000 small tensors blocks", "ms", runs[10_000], runs[40], "40 tensors", "ratio <= 2"
        )
    ]


def _lazy(steps: int, rounds: int, say: Callable[[str], None], width: int) -> list[Figure]:
    """Steps of a small training: without saves, with a lazy save at each fourth, with a plain one.

    Once with both nodes on the trainer's cores as equals: two nodes' work on one machine. Once with the holder giving
    way, since elsewhere it would have cores of its own.
    """
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.randn(512, width)
    size = 3 * sum(p.numel() * 4 for p in net.parameters())

    def train(ckpt: Checkpointer, first: int, lazy: bool | None) -> tuple[float, float]:
        """Mean milliseconds of a step, its share of saves and waits included; what the trainer itself stood still."""
        times, handles = [], []
        for step in range(first, first + steps):
            started = time.perf_counter()
            if lazy is not None and step % 4 == 0:
                state = {"net": net, "optimizer": optimizer, "step": step}
                handles.append(ckpt.save(step, state, lazy=lazy))
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            times.append((time.perf_counter() - started) * 1e3)
        stood_s = sum(float(handle.stats["blocked_s"]) for handle in handles)
        return statistics.fmean(times), stood_s * 1e3 / steps

    figures = []
    for aside in (False, True):
        runs: dict[bool | None, list[float]] = {None: [], True: [], False: []}
        stood: dict[bool | None, list[float]] = {None: [], True: [], False: []}
        with _cluster(size) as cluster, _trainer(cluster, "lazy") as ckpt:
            if aside:
                _step_aside(cluster, "node-1")
            at = 1
            for number in range(rounds + 1):
                for lazy, found in runs.items():
                    step_ms, stood_ms = train(ckpt, at, lazy)
                    at += steps
                    say(
                        f"training, lazy saves {lazy}: {step_ms:.1f} ms a step, {stood_ms:.1f} standing still"
                    )
                    if number:  # the first round touches the memory
                        found.append(step_ms)
                        stood[lazy].append(stood_ms)
        limit = "the same steps without saves"
        where = ", the holder at niceness 19" if aside else ""
        for lazy, kind in ((True, "lazy"), (False, "plain")):
            goal = "ratio <= 1.02" if lazy else ""
            name = f"step with a {kind} save at each fourth{where}"
            figures.append(Figure(name, "ms", runs[lazy], runs[None], limit, goal))
            name = f"of that, the trainer itself stands still{where} ({kind})"
            figures.append(Figure(name, "ms", stood[lazy], runs[None], limit))
    return figures


def _step_aside(cluster: LocalCluster, node_id: str) -> None:
    """Make a node give way to everything: elsewhere it would have cores of its own, here it takes the trainer's."""
    (node,) = (n for n in cluster.status()["nodes"] if n["node_id"] == node_id)
    for pid in node["pids"]:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
