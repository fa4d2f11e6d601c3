"""A restarted trainer's load: from local RAM, and onto an empty node from one holder and from three.

Loopback is no link: here three holders take turns on the same cores as one, and what is seen is the cost of the bytes.
What several holders gain where their links bind is a matter of shaped links (`links.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastcheck import Checkpointer
from fastcheck.local import LocalCluster

from .limits import Memcpy
from .report import Figure
from .workload import gpt2_state, state_bytes

#: Node → holders of its rank's state.
HOLDERS = (1, 3)


def small_state() -> dict[str, Any]:
    """For seeing that it runs."""
    state = gpt2_state(seed=1)
    del state["optimizer"]
    return state


def restoring(
    make_cluster: Callable[[int], Any], rounds: int, quick: bool, say: Callable[[str], None]
) -> list[Figure]:
    """All rows; `make_cluster(n)` is a context manager of a cluster whose ranks' states go to n holders."""
    state = small_state() if quick else gpt2_state(seed=1)
    figures = []
    for holders in HOLDERS:
        with make_cluster(holders) as cluster:
            save(cluster, state)
            if holders == 1:
                figures.append(from_local_ram(cluster, state, rounds, say))
            figures.append(onto_an_empty_node(cluster, state, holders, max(1, rounds // 3), say))
    return figures


def save(cluster: LocalCluster, state: dict[str, Any]) -> None:
    """Have one step of the state committed."""
    with Checkpointer("restore", rank=0, world_size=1, address=cluster.address("node-0")) as ckpt:
        ckpt.save(1, state).result(timeout=300)


def load(cluster: LocalCluster, state: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds of a load by a new process' Checkpointer, and its stats."""
    with Checkpointer("restore", rank=0, world_size=1, address=cluster.address("node-0")) as ckpt:
        ckpt.steps()  # connects; a trainer has done so long before
        started = time.perf_counter()
        ckpt.load(state)
        return time.perf_counter() - started, dict(ckpt.load_stats)


def from_local_ram(
    cluster: LocalCluster, state: dict[str, Any], rounds: int, say: Callable[[str], None]
) -> Figure:
    """Every byte is verified and copied; in turns with memcpy."""
    memcpy = Memcpy(state_bytes(state))
    load(cluster, state)
    taken, copies = [], []
    for _ in range(rounds):
        copies.append(memcpy.run() * 1e3)
        took_s, stats = load(cluster, state)
        assert stats["local_bytes"] == stats["bytes"]
        taken.append(took_s * 1e3)
        say(f"restore from local RAM {taken[-1]:.0f} ms, memcpy {copies[-1]:.0f} ms")
    return Figure("restore from local RAM, verified", "ms", taken, copies, "memcpy, 1 thread", "ratio <= 0.9")


def onto_an_empty_node(
    cluster: LocalCluster, state: dict[str, Any], holders: int, rounds: int, say: Callable[[str], None]
) -> Figure:
    """The owner's machine loses its memory each time."""
    rates = []
    for _ in range(rounds):
        cluster.kill("node-0", wipe=True)
        cluster.start("node-0")
        took_s, stats = load(cluster, state)
        assert stats["fetched_bytes"] > 0
        rates.append(stats["fetched_bytes"] / took_s / 1e9)
        say(f"restore onto an empty node from {stats['holders']} holders {rates[-1]:.2f} GB/s")
    plural = "s" * (holders > 1)
    return Figure(f"restore onto an empty node (fresh memory) from {holders} holder{plural}", "GB/s", rates)
