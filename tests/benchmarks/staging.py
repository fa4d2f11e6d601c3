"""What staging costs a trainer: plain and lazy saves, the first one, many small tensors. Limits in the same rounds."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastcheck import Checkpointer
from fastcheck.copier import default_copy_threads
from fastcheck.local import LocalCluster

from .limits import Memcpy
from .report import Figure
from .workload import change, gpt2_state, state_bytes

#: Saves before the measured ones: the first ones touch fresh memory.
_WARM_UP = 3

Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    #: Equal tensors and bytes of the state; no tensors: as GPT-2 has it.
    tensors: int = 0
    state_bytes: int = 0
    small_bytes: int = 750_000_000
    #: Of the training, and its layers' width.
    steps: int = 40
    width: int = 1024

    def state(self) -> Any:
        """What is saved."""
        return _even_state(self.tensors, self.state_bytes) if self.tensors else gpt2_state()


@contextmanager
def _cluster(size_bytes: int, **settings: Any) -> Iterator[LocalCluster]:
    """One holder, and room for every step that may be kept or under way. `settings`: the daemons' config keys."""
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        LocalCluster(Path(folder)) as cluster,
    ):
        ram_budget = f"{max(256, 5 * size_bytes >> 20)}MiB"
        cluster.up(2, tolerate=1, ram_budget=ram_budget, settings=settings)
        yield cluster


def _trainer(cluster: LocalCluster, job: str, threads: int | None = None) -> Checkpointer:
    return Checkpointer(
        job, rank=0, world_size=1, address=cluster.address("node-0"), copy_threads=threads, timeout_s=300
    )


def _save_ms(ckpt: Checkpointer, step: int, state: Any) -> float:
    handle = ckpt.save(step, state)
    handle.result(timeout=300)
    return float(handle.stats["blocked_s"]) * 1e3


def _threads(size: Size, say: Say) -> list[Figure]:
    """One copying thread, and as many as cores are idle."""
    figures = []
    state, rounds = size.state(), size.rounds
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


def _first(size: Size, say: Say) -> list[Figure]:
    """The first save of a job, on a cluster that has none of its memory: prepared and not."""
    state = size.state()
    memcpy = Memcpy(state_bytes(state))
    figures = []
    for prepared in (False, True):
        runs, limits = [], []
        for _ in range(max(1, size.rounds // 3)):
            with _cluster(state_bytes(state)) as cluster, _trainer(cluster, "first") as ckpt:
                ckpt.steps()
                if prepared:
                    ckpt.prepare(state)
                limits.append(memcpy.run() * 1e3)
                runs.append(_save_ms(ckpt, 1, state))
                say(f"first save, prepared {prepared}: {runs[-1]:.0f} ms, memcpy {limits[-1]:.0f} ms")
        name = "first save blocks, after prepare" if prepared else "first save blocks"
        goal = "ratio <= 2" if prepared else ""
        figures.append(Figure(name, "ms", runs, limits, "memcpy, 1 thread", goal))
    return figures


def _even_state(tensors: int, size_bytes: int) -> dict[str, Any]:
    """So many equal tensors of so many bytes together."""
    return {"t": {str(i): torch.randn(size_bytes // 4 // tensors) for i in range(tensors)}}


def _many_small(size: Size, say: Say) -> list[Figure]:
    """The same bytes in 10,000 tensors and in 40, in turn."""
    size_bytes, rounds = size.small_bytes, size.rounds
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


class _Training:
    """A small training on this process' cores, and its mean step with saves at each fourth and without."""

    def __init__(self, width: int, steps: int) -> None:
        torch.manual_seed(1)
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
        self._net = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._net.parameters())
        self._batch = torch.randn(512, width)
        self._steps, self._done = steps, 0
        self.size_bytes = 3 * sum(p.numel() * 4 for p in self._net.parameters())

    def run(self, ckpt: Checkpointer, lazy: bool | None) -> tuple[float, float]:
        """Mean milliseconds of a step, its share of saves and waits included; what the trainer itself stood still.

        `lazy`: of the saves; None: no saves.
        """
        times, handles = [], []
        for step in range(self._done + 1, self._done + self._steps + 1):
            started = time.perf_counter()
            if lazy is not None and step % 4 == 0:
                state = {"net": self._net, "optimizer": self._optimizer, "step": step}
                handles.append(ckpt.save(step, state, lazy=lazy))
            self._optimizer.zero_grad()
            self._net(self._batch).square().mean().backward()
            self._optimizer.step()
            times.append((time.perf_counter() - started) * 1e3)
        self._done += self._steps
        stood_s = sum(float(handle.stats["blocked_s"]) for handle in handles)
        return statistics.fmean(times), stood_s * 1e3 / self._steps


def _together(*_clusters: LocalCluster) -> AbstractContextManager[None]:
    """Trainer and both nodes on all cores, as equals: what one machine makes of two nodes' work."""
    return nullcontext()


def _holder_aside(cluster: LocalCluster) -> AbstractContextManager[None]:
    """The holder gives way to everything: elsewhere it would have cores of its own, here it takes the trainer's."""
    for pid in _pids(cluster, "node-1"):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
    return nullcontext()


def _apart(*clusters: LocalCluster) -> AbstractContextManager[None]:
    """The training on one half of the cores, all daemons on the other: as on a node whose training leaves cores idle.

    What the SDK does in the trainer's process, lazy copies included, stays on the trainer's half.
    """
    return apart(
        pid for cluster in clusters for node_id in cluster.node_ids for pid in _pids(cluster, node_id)
    )


def _pids(cluster: LocalCluster, node_id: str) -> list[int]:
    (node,) = (n for n in cluster.status()["nodes"] if n["node_id"] == node_id)
    found: list[int] = node["pids"]
    return found


def _steps(
    where: Callable[[LocalCluster], AbstractContextManager[None]], said: str, size: Size, say: Say
) -> list[Figure]:
    """Steps of a small training: without saves, with a lazy save at each fourth, with a plain one, in turns."""
    training = _Training(size.width, size.steps)
    runs: dict[bool | None, list[float]] = {None: [], True: [], False: []}
    stood: dict[bool | None, list[float]] = {None: [], True: [], False: []}
    with (
        _cluster(training.size_bytes) as cluster,
        _trainer(cluster, "lazy") as ckpt,
        where(cluster),
    ):
        for number in range(size.rounds + 1):
            for lazy, found in runs.items():
                step_ms, stood_ms = training.run(ckpt, lazy)
                say(
                    f"training{said}, lazy saves {lazy}: {step_ms:.1f} ms a step, {stood_ms:.1f} standing still"
                )
                if number:  # the first round touches the memory
                    found.append(step_ms)
                    stood[lazy].append(stood_ms)
    limit = "the same steps without saves"
    figures = []
    for lazy, kind in ((True, "lazy"), (False, "plain")):
        goal = "ratio <= 1.02" if lazy else ""
        name = f"step with a {kind} save at each fourth{said}"
        figures.append(Figure(name, "ms", runs[lazy], runs[None], limit, goal))
        name = f"of that, the trainer itself stands still{said} ({kind})"
        figures.append(Figure(name, "ms", stood[lazy], runs[None], limit))
    return figures


ROWS: dict[str, Callable[[Size, Say], list[Figure]]] = {
    "threads": _threads,
    "first": _first,
    "tensors": _many_small,
    "steps": lambda size, say: _steps(_together, "", size, say),
    "steps-aside": lambda size, say: _steps(_holder_aside, ", the holder at niceness 19", size, say),
    "steps-apart": lambda size, say: _steps(
        _apart, ", trainer and daemons each on one half of the cores", size, say
    ),
}


def measure(rounds: int, quick: bool, say: Say, rows: Sequence[str] | None = None) -> list[Figure]:
    """All rows of staging, or some."""
    size = Size(1, 40, 30_000_000, 60_000_000, 5, 256) if quick else Size(rounds)
    figures = []
    for name in rows or ROWS:
        if name == "steps-apart" and len(os.sched_getaffinity(0)) < 2:
            say("training and daemons apart are left out: there is one core")
            continue
        figures += ROWS[name](size, say)
    return figures


def halves(cores: Iterable[int], siblings: dict[int, int] | None = None) -> tuple[list[int], list[int]]:
    """Two halves of some cores. Hardware threads of one core stay together, where there is more than one core.

    Args:
        siblings: hardware thread → the first one of its core; by default as the kernel says.
    """
    known = {core: _first_sibling(core) for core in cores} if siblings is None else siblings
    ordered = sorted(cores, key=lambda core: (known[core], core))
    borders = [i for i in range(1, len(ordered)) if known[ordered[i - 1]] != known[ordered[i]]]
    half = min(borders or [len(ordered) // 2], key=lambda border: abs(border - len(ordered) / 2))
    return ordered[:half], ordered[half:]


@contextlib.contextmanager
def apart(others: Iterable[int]) -> Iterator[None]:
    """This process on one half of its cores, with as many torch threads; the processes `others` on the other half."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    mine, theirs = halves(cores)
    for pid in others:
        _pin(pid, theirs)
    _pin(os.getpid(), mine)
    torch.set_num_threads(len(mine))
    try:
        yield
    finally:
        _pin(os.getpid(), sorted(cores))
        torch.set_num_threads(threads)


def _pin(pid: int, cores: Sequence[int]) -> None:
    """All threads that there are; those to come inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def _first_sibling(core: int) -> int:
    text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    return int(text.replace("-", ",").split(",")[0])
