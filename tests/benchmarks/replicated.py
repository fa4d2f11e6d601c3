"""A data-parallel job's save: every rank its whole state, against a part each (docs/replicated.md).

All ranks are in this process and share its cores, so what is compared is the work of all of them together: the
bytes that each sends, and how long `save` blocks them one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastcheck import Checkpointer
from fastcheck.local import LocalCluster

from .report import Figure
from .workload import change, gpt2_state, state_bytes

RANKS = 4
WARM_UP = 2
PLAIN = "every rank saves all"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "replicated, all compared": {"replicated": True},
    "replicated, compared in pairs": {"replicated": True, "compare": "pairs"},
    "replicated, not compared": {"replicated": True, "compare": "off"},
}


def replicated(cluster: LocalCluster, rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """Saves of four ranks that hold the same, plain and replicated with each kind of comparison."""
    state = gpt2_state()
    say(f"the state has {state_bytes(state) / 1e6:.0f} MB")
    figures: list[Figure] = []
    plain: dict[str, list[float]] = {}
    for number, (name, options) in enumerate(WAYS.items()):
        runs = _saves(cluster, f"bench-{number}", state, options, rounds)
        say(f"{name}: {sum(runs['sent']) / len(runs['sent']):.0f} MB sent per rank and step")
        for what, unit, key in (
            ("staged per rank", "MB", "staged"),
            ("sent per rank, encoded", "MB", "sent"),
            ("save blocks each rank", "ms", "save"),
        ):
            limit = (plain[key], PLAIN) if plain else ((), "")
            figures.append(Figure(f"{name}: {what}", unit, runs[key], *limit))
        plain = plain or runs
    return figures


def _saves(
    cluster: LocalCluster, job: str, state: dict[str, Any], options: dict[str, Any], rounds: int
) -> dict[str, list[float]]:
    runs: dict[str, list[float]] = {"staged": [], "sent": [], "save": []}
    nodes = cluster.node_ids
    ckpts = [
        Checkpointer(
            job, rank=rank, world_size=RANKS, address=cluster.address(nodes[rank % len(nodes)]), **options
        )
        for rank in range(RANKS)
    ]
    try:
        for step in range(1, WARM_UP + rounds + 1):
            change(state)
            handles = []
            for ckpt in ckpts:
                started = time.perf_counter()
                handles.append(ckpt.save(step, state))
                if step > WARM_UP:
                    runs["save"].append((time.perf_counter() - started) * 1e3)
            for handle in handles:
                handle.result(timeout=600)
                if step > WARM_UP:
                    runs["staged"].append(handle.stats["bytes"] / 1e6)
                    runs["sent"].append(handle.stats["encoded_bytes"] / 1e6)
    finally:
        for ckpt in ckpts:
            ckpt.close()
    return runs
