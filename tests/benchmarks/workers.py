"""`--only workers`: one data process against several: the same threads encode and decode here or in worker processes.

What the interpreter's lock costs shows only where more threads want to run than it lets: about three (docs/workers.md).
A machine with fewer cores shows what handing a chunk over costs, and that is then said beside the figures.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from fastcheck import Checkpointer
from fastcheck.local import LocalCluster
from fastcheckd.codec.fitting import Fits
from fastcheckd.counters import Counters
from fastcheckd.store.copying import copy_bytes
from fastcheckd.store.segments import Segment
from fastcheckd.workers.crew import Workers
from fastcheckd.workers.work import HERE, ChunkWork, WorkInWorkers

from .codec import Chunk, chunks_of
from .report import Figure
from .sequences import adamw_fp32, pairs, sequences

#: Data processes that are compared. One: threads alone.
PROCESSES = (1, 2, 3)
THREADS = 2
#: Saves before the measured ones: cold memory, and a first step that has no base.
WARM_UP = 3
_PLACE_ALIGNED = 64


class _Stage:
    """The chunks of two steps in segments, and a place for each that is decoded."""

    def __init__(self, folder: Path) -> None:
        pair = next(p for s in sequences(True) if s.name == "AdamW, fp32" for p in pairs(s))
        self.steps = pair.base.step, pair.new.step
        own = chunks_of(pair)
        self.raw_bytes = sum(len(chunk.new) for chunk in own)
        self._views = [self._segment(folder, own) for _ in range(3)]
        self.chunks = [
            replace(chunk, new=new, base=base)
            for chunk, new, base in zip(own, self._views[0], self._views[1], strict=True)
        ]
        self.outs = self._views[2]
        for chunk, before in zip(self.chunks, own, strict=True):
            copy_bytes(chunk.new, before.new)
            copy_bytes(chunk.base, before.base)
        self.payloads = [
            encoded.payload if (encoded := self.encode(HERE, c, Fits())[0]) else b"" for c in self.chunks
        ]

    def _segment(self, folder: Path, chunks: list[Chunk]) -> list[memoryview]:
        sizes = [-(-len(chunk.new) // _PLACE_ALIGNED) * _PLACE_ALIGNED for chunk in chunks]
        segment = Segment.create(folder, -(-sum(sizes) // 4096) * 4096, "copy")
        views, at = [], 0
        for chunk, size in zip(chunks, sizes, strict=True):
            views.append(segment.view[at : at + len(chunk.new)])
            at += size
        return views

    def encode(self, work: ChunkWork, chunk: Chunk, fits: Fits) -> Any:
        """As an owner does."""
        return work.encode(
            chunk.new, chunk.base, chunk.plan, step=self.steps[1], base_step=self.steps[0], digest=chunk.digest,
            base_digest=chunk.base_digest, fits=fits,
        )  # fmt: skip

    def encode_all(self, work: ChunkWork, threads: ThreadPoolExecutor) -> None:
        """All chunks, as one save has them."""
        fits = Fits()
        list(threads.map(lambda chunk: self.encode(work, chunk, fits), self.chunks))

    def apply_all(self, work: ChunkWork, threads: ThreadPoolExecutor) -> None:
        """As a holder does with a patch, up to the way back."""
        todo = [entry for entry in zip(self.chunks, self.payloads, self.outs, strict=True) if entry[1]]
        list(threads.map(lambda t: work.apply(t[1], t[0].base, t[2], old_digest=t[0].base_digest), todo))


def chunk_work(rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """Encoding and applying the chunks of an AdamW step on THREADS threads, by the number of data processes."""
    rates: dict[tuple[str, int], list[float]] = {}
    cpu: dict[tuple[str, int], list[float]] = {}
    asking: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-", dir="/dev/shm") as folder,
        ThreadPoolExecutor(THREADS) as threads,
        ExitStack() as stack,
    ):
        stage = _Stage(Path(folder))
        crews = {n: stack.enter_context(closing(_crew(Path(folder), n))) for n in PROCESSES[1:]}
        counters = Counters()
        works: dict[int, ChunkWork] = {1: HERE} | {
            n: WorkInWorkers(crew, counters) for n, crew in crews.items()
        }
        ways = {"encoded": stage.encode_all, "applied": stage.apply_all}
        for round_ in range(rounds + 1):
            for (processes, work), (name, way) in itertools.product(works.items(), ways.items()):
                pids = crews[processes].pids if processes > 1 else []
                there_s, here_s, started = _cpu_s(pids), time.process_time(), time.perf_counter()
                way(work, threads)
                seconds = time.perf_counter() - started
                here_s, there_s = time.process_time() - here_s, _cpu_s(pids) - there_s
                if round_ == 0:
                    continue  # working memory, and pages of the workers' scratch
                rates.setdefault((name, processes), []).append(stage.raw_bytes / seconds / 1e9)
                cpu.setdefault((name, processes), []).append((here_s + there_s) / (stage.raw_bytes / 1e9))
                if processes > 1:
                    asking.append(here_s / len(stage.chunks) * 1e6)
        if counters.get("chunks_not_by_workers"):
            raise RuntimeError("chunks were not done by workers: these are no figures of them")
        say(
            f"{THREADS} codec threads, {os.cpu_count()} cores: {len(stage.chunks)} chunks, {stage.raw_bytes} bytes"
        )
    figures = [
        Figure(f"{name} by {n} data processes", unit, runs[name, n], runs[name, 1], "threads alone")
        for name in ways
        for unit, runs in (("GB/s", rates), ("s of CPU per GB", cpu))
        for n in PROCESSES[1:]
    ]
    return [*figures, Figure("CPU of the data process for a chunk that a worker does", "us", asking)]


def _crew(folder: Path, processes: int) -> Workers:
    """The workers that make so many data processes, ready."""
    count = processes - 1
    crew = Workers(
        folder, processes=count, threads=-(-THREADS // count), nice=0, timeout_s=60, counters=Counters()
    )
    if not crew.wait_ready(count, 60):
        crew.close()
        raise RuntimeError("worker processes do not start; their messages are above")
    return crew


def _cpu_s(pids: Sequence[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


def commits(rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """State bytes per second from seal to commit, of a training that saves every step to one peer, all encoded."""
    runs: dict[int, list[float]] = {n: [] for n in PROCESSES}
    training = adamw_fp32(WARM_UP + rounds)
    with tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder, ExitStack() as stack:
        savers = {}
        for processes in PROCESSES:
            cluster = stack.enter_context(LocalCluster(Path(folder) / str(processes)))
            cluster.up(
                2, tolerate=1, ram_budget="512MiB",
                settings={"codec": "always", "spread": 1, "codec_threads": THREADS, "data_processes": processes},
            )  # fmt: skip
            savers[processes] = stack.enter_context(
                Checkpointer("workers", rank=0, world_size=1, address=cluster.address("node-0"))
            )
        for step in range(1, WARM_UP + rounds + 1):
            training.step(step)
            for processes, saver in savers.items():
                stats = saver.save(step, training.state).result(timeout=300).stats
                seconds = stats["replicate_s"] + stats["commit_s"]
                say(
                    f"step {step}, {processes} data processes: {stats['ratio']:.2f} times smaller, {seconds:.3f} s"
                )
                if step > WARM_UP:
                    runs[processes].append(stats["bytes"] / seconds / 1e9)
    return [
        Figure(f"encoded and committed by {n} data processes", "GB/s", runs[n], runs[1], "one data process")
        for n in PROCESSES[1:]
    ]


def measure(rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """Both, the chunks by themselves and the whole way."""
    return chunk_work(rounds, say) + commits(rounds, say)
