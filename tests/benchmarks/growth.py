"""`--only growth`: what more bytes and more nodes cost, and how much memory a node takes, all on one machine.

In bytes: one trainer's state from 0.1 to 4 GB; the cost is linear if it stays the same multiple of a copy. In nodes: 2
to 8, each with a rank of its own and a link of its own, shaped in network namespaces (root); the cost per node is flat
if it stays the same multiple of what the link's payload takes. A row that the machine has no memory for says so.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tests.netlab.lab import Lab
from tests.netlab.wires import why_not

from fastcheck import Checkpointer, FastCheckError
from fastcheck.local import LocalCluster

from .limits import Memcpy
from .report import Figure
from .resident import Sampler
from .workload import adamw_state, change, gpt2_state, state_bytes, width_of

SIZES_GB = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0)
NODES = (2, 3, 4, 6, 8)
LINK_MBIT_PER_S = 1000.0
#: Payload of TCP at an MTU of 1500, with time stamps.
PAYLOAD_SHARE = 0.956
STATE_PER_NODE_BYTES = 50e6
#: With room for one kept step and one under way: as little memory as there can be, so that large states have room.
ONE_STEP = {"spread": 1, "keep_steps": 1}
#: Of the memory per node: three processes weigh less than a fifth of it.
MEMORY_STATE_BYTES = 0.75e9
#: A node's store, in states: its own and another's kept step and one under way, and more than enough room for both.
AMPLE = 9.0
#: More room than is needed; that of the full contract, with and without the codec; lean; the same for two steps
#: (docs/operations.md).
MEMORY_SETTINGS: tuple[tuple[dict[str, Any], float], ...] = (
    ({"keep_steps": 1, "codec": "auto"}, AMPLE),
    ({"keep_steps": 1, "codec": "auto"}, 4.25),
    ({"keep_steps": 1, "codec": "always"}, 4.25),
    ({"keep_steps": 1, "codec": "auto"}, 3.4),
    ({"keep_steps": 2, "codec": "auto"}, 6.4),
    ({"keep_steps": 2, "codec": "auto"}, 4.5),
)
BUDGET_MIN_BYTES = 256 << 20
WARM_UP = 3
#: Everything of one owner and one holder, the trainer's own state included, as a multiple of the state; and what the
#: rest takes. Beyond the machine's memory a size is left out.
NEED_STATES, NEED_BYTES = 5.4, 1.6e9
#: A copy is timed with at most so many bytes and counted per byte, so that the largest states have room.
MEMCPY_MAX_BYTES = 500_000_000
TIMEOUT_S = 120

Say = Callable[[str], None]


def growth(rounds: int, say: Say, *, quick: bool) -> tuple[list[Figure], list[str]]:
    """Figures, and what was not run with its reason."""
    not_run: list[str] = []
    sizes = [0.03, 0.06] if quick else SIZES_GB
    counts = (2, 3) if quick else NODES
    figures = in_bytes(sizes, rounds, say, not_run)
    figures += in_nodes(counts, 10e6 if quick else STATE_PER_NODE_BYTES, rounds, say, not_run)
    figures += memory_per_node(30e6 if quick else MEMORY_STATE_BYTES, rounds, say, not_run)
    return figures, not_run


def in_bytes(sizes_gb: Sequence[float], rounds: int, say: Say, not_run: list[str]) -> list[Figure]:
    """Save, commit and restore of ever larger states, next to a copy of as many bytes."""
    figures = []
    for size_gb in sizes_gb:
        need_bytes = NEED_STATES * size_gb * 1e9 + NEED_BYTES
        if need_bytes > psutil.virtual_memory().available:
            not_run.append(f"growth in bytes, {size_gb:g} GB: needs {need_bytes / 1e9:.3g} GB of free memory")
            say(not_run[-1])
            continue
        figures += _one_size(size_gb, rounds, say)
    return figures


def _one_size(size_gb: float, rounds: int, say: Say) -> list[Figure]:
    state = gpt2_state(width=width_of(size_gb * 1e9))
    size_bytes = state_bytes(state)
    copied_bytes = min(size_bytes, MEMCPY_MAX_BYTES)
    memcpy = Memcpy(copied_bytes)
    runs: dict[str, list[float]] = {"save blocks": [], "replicated and committed": [], "restore": []}
    copies_ms = []
    with tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder, LocalCluster(folder) as cluster:
        cluster.up(
            2, tolerate=1, ram_budget=max(BUDGET_MIN_BYTES, round(2.3 * size_bytes)), settings=ONE_STEP
        )
        with Checkpointer("growth", rank=0, world_size=1, address=cluster.address("node-0")) as checkpointer:
            for step in range(1, WARM_UP + rounds + 1):
                change(state)
                copy_ms = memcpy.run() * size_bytes / copied_bytes * 1e3
                started = time.perf_counter()
                handle = checkpointer.save(step, state)
                blocked_ms = (time.perf_counter() - started) * 1e3
                handle.result(timeout=TIMEOUT_S)
                committed_ms = (time.perf_counter() - started) * 1e3
                started = time.perf_counter()
                checkpointer.load(state)
                restore_ms = (time.perf_counter() - started) * 1e3
                say(
                    f"{size_gb:g} GB, step {step}: memcpy {copy_ms:.0f} ms, blocked {blocked_ms:.0f}, "
                    f"committed {committed_ms:.0f}, restore {restore_ms:.0f}"
                )
                if step > WARM_UP:
                    copies_ms.append(copy_ms)
                    for name, value in zip(runs, (blocked_ms, committed_ms, restore_ms), strict=True):
                        runs[name].append(value)
    row = f"{size_gb:g} GB"
    return [
        Figure(
            f"growth in bytes: {name}, {row}",
            "ms",
            values,
            copies_ms,
            "memcpy, 1 thread",
            "same ratio for all",
        )
        for name, values in runs.items()
    ]


@contextlib.contextmanager
def _nodes(count: int, size_bytes: int, *, shaped: bool) -> Iterator[Callable[[str], str]]:
    """A cluster of so many nodes, with a link of the rate for each if they can be shaped: node → its address."""
    # One peer each and no codec: what travels is the state, once.
    settings: dict[str, Any] = {"spread": 1, "codec": "never"}
    budget = max(BUDGET_MIN_BYTES, round(AMPLE * size_bytes))
    with tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder:
        if not shaped:
            with LocalCluster(folder) as cluster:
                cluster.up(count, tolerate=1, ram_budget=budget, settings=settings)
                yield cluster.address
            return
        with Lab(Path(folder), count, ram_budget_bytes=budget, tolerate=1, **settings) as lab:
            for node in lab.node_ids:
                lab.network.shape(node, LINK_MBIT_PER_S)
            yield lab.address


def in_nodes(
    counts: Sequence[int], state_per_node_bytes: float, rounds: int, say: Say, not_run: list[str]
) -> list[Figure]:
    """All nodes' ranks save at once: from the first call until the step is committed."""
    reason = why_not()
    if reason:
        not_run.append(f"growth in nodes over shaped links: {reason}; over the loopback instead")
        say(not_run[-1])
    where = "loopback, not shaped" if reason else f"{LINK_MBIT_PER_S / 1000:g} Gbit/s each"
    figures = []
    for count in counts:
        states = [gpt2_state(seed=rank, width=width_of(state_per_node_bytes)) for rank in range(count)]
        size_bytes = state_bytes(states[0])
        with _nodes(count, size_bytes, shaped=not reason) as address:
            seconds = _all_save(address, states, partial(_change_all, states), rounds, say)
        limits = [] if reason else [size_bytes * 8 / (LINK_MBIT_PER_S * 1e6 * PAYLOAD_SHARE)] * len(seconds)
        figures.append(
            Figure(
                f"growth in nodes: all ranks replicated and committed ({where}), {count} nodes",
                "s",
                seconds,
                limits,
                "the link's payload rate" if limits else "",
                "same ratio for all" if limits else "",
            )
        )
    return figures


def _change_all(states: Sequence[dict[str, Any]]) -> None:
    for state in states:
        change(state)


def _all_save(
    address: Callable[[str], str],
    states: Sequence[dict[str, Any]],
    advance: Callable[[], object],
    rounds: int,
    say: Say,
) -> list[float]:
    count = len(states)
    seconds = []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(count))
        ranks = [
            stack.enter_context(
                Checkpointer("growth", rank=rank, world_size=count, address=address(f"node-{rank}"))
            )
            for rank in range(count)
        ]

        def save(rank: int, step: int) -> None:
            ranks[rank].save(step, states[rank]).result(timeout=TIMEOUT_S)

        for step in range(1, WARM_UP + rounds + 1):
            advance()
            started = time.perf_counter()
            for done in [pool.submit(save, rank, step) for rank in range(count)]:
                done.result(timeout=TIMEOUT_S)
            taken_s = time.perf_counter() - started
            say(f"{count} nodes, step {step}: all committed in {taken_s:.2f} s")
            if step > WARM_UP:
                seconds.append(taken_s)
    return seconds


def memory_per_node(size: float, rounds: int, say: Say, not_run: list[str]) -> list[Figure]:
    """Two nodes, a rank on each, `tolerate` 1: a node's own state, another's, and its three processes."""
    # One state for both ranks: the trainers' own memory is not counted, and need not be there twice. It takes real
    # steps, since lean nodes live by what the codec makes of them.
    state, take_step = adamw_state(width=width_of(size))
    size_bytes = 3 * sum(p.numel() * p.element_size() for p in state["model"].values())
    need_bytes = 2 * AMPLE * size_bytes + NEED_BYTES
    if need_bytes > psutil.virtual_memory().available:
        not_run.append(f"memory per node: needs {need_bytes / 1e9:.3g} GB of free memory")
        say(not_run[-1])
        return []
    figures = []
    for settings, budget_states in MEMORY_SETTINGS:
        budget = max(BUDGET_MIN_BYTES, round(budget_states * size_bytes))
        row = "; ".join(f"{key}: {value}" for key, value in settings.items())
        row += f"; {budget_states:g} states of room"
        with (
            tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
            LocalCluster(folder) as cluster,
        ):
            cluster.up(2, tolerate=1, ram_budget=budget, settings=settings | {"spread": 1})
            nodes = {
                node["node_id"]: (Path(node["ram_dir"]), node["pids"]) for node in cluster.status()["nodes"]
            }
            with Sampler(nodes) as sampler:
                try:
                    seconds = _all_save(cluster.address, [state] * 2, take_step, rounds, say)
                except FastCheckError as error:  # too little room is an answer, too
                    not_run.append(f"memory per node, {row}: {error}")
                    say(not_run[-1])
                    continue
                highest = sampler.highest_bytes()
                resting, directories = sampler.now_bytes(), sampler.directories_bytes()
        figures.append(Figure(f"memory per node: both ranks committed, {row}", "s", seconds))
        measured = {
            "highest": highest,
            "between saves": resting,
            "RAM directory alone, between saves": directories,
        }
        for what, found in measured.items():
            multiples = [value / size_bytes for value in found.values()]
            say(f"memory per node, {what}, {row}: {multiples}")
            name = f"memory per node: {what} ({size_bytes / 1e9:.3g} GB), {row}"
            goal = "<= 4.3 full, <= 3.4 lean" if found is highest else ""
            figures.append(Figure(name, "x the state", multiples, goal=goal))
    return figures
