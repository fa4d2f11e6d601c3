"""FastCheck itself, through a local cluster of real daemons: three nodes, one copy elsewhere, committed."""

from __future__ import annotations

from pathlib import Path

from fastcheck import Checkpointer
from fastcheck.local import LocalCluster

from ..workload import state_bytes
from .candidate import Places, State, UntilSafe

#: A node's store while saves follow each other: the step before, the one under way, a spare one; and some room.
BUDGET_STATES = 5.0
BUDGET_MIN_BYTES = 256 << 20


def cluster_folder(disk: Path) -> Path:
    """Where the cluster is: whoever kills the process takes it down there."""
    return disk / "cluster"


class FastCheck:
    """One trainer on one of three nodes, all voters, and `spread: 1`, so that all goes to one peer.

    Args:
        copy_threads: as of `Checkpointer`; None: its default, which takes idle cores.
    """

    def __init__(self, places: Places, state: State, copy_threads: int | None) -> None:
        self._copy_threads = copy_threads
        self._cluster = LocalCluster(cluster_folder(places.disk))
        budget = max(BUDGET_MIN_BYTES, round(BUDGET_STATES * state_bytes(state)))
        self._cluster.up(3, tolerate=1, ram_budget=budget, settings={"spread": 1})
        try:
            self._checkpointer = self._connect()
        except BaseException:
            self._cluster.down()
            raise

    def _connect(self) -> Checkpointer:
        return Checkpointer(
            "peers",
            rank=0,
            world_size=1,
            address=self._cluster.address("node-0"),
            copy_threads=self._copy_threads,
        )

    def save(self, step: int, state: State) -> UntilSafe:
        """Returns when the bytes are in the daemon's memory."""
        handle = self._checkpointer.save(step, state)

        def until_safe() -> dict[str, float]:
            handle.result(timeout=300)
            stats = handle.stats
            return {"replicate": stats["replicate_s"], "commit": stats["commit_s"]}

        return until_safe

    def restore(self, state: State) -> None:
        """As the same trainer, without leaving it; every byte is checked."""
        self._checkpointer.load(state)

    def close(self) -> None:
        """End the cluster; its memory goes with it."""
        self._checkpointer.close()
        self._cluster.down()
