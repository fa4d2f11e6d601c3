"""Real clusters of real daemons on loopback.

Starting a cluster costs more than most tests do in it, so the tests of a file share one where they can, each with a
job of its own name: `shared_cluster` where they kill what is then started again, `standing_cluster` where they hurt
nobody. With other settings, or another history, a test has a cluster of its own. Whatever happens, a cluster is taken
down in the end; its logs are in pytest's temporary folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastcheck.local import LocalCluster


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    """Starts a cluster; `make_cluster(4, tolerate=2, key=value...)` takes the daemon's config keys."""
    with contextlib.ExitStack() as stack:

        def make(
            nodes: int, *, tolerate: int = 1, ram_budget: str = "256MiB", **settings: Any
        ) -> LocalCluster:
            cluster = stack.enter_context(LocalCluster(tmp_path / "cluster"))
            # Two steps: tests look at what becomes of the older one.
            cluster.up(
                nodes, tolerate=tolerate, ram_budget=ram_budget, settings={"keep_steps": 2, **settings}
            )
            return cluster

        yield make


class SharedCluster:
    """A file's cluster of some size with the defaults, for one test after the other; there is one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: list[int] = []
        self._cluster: LocalCluster | None = None

    def __call__(self, nodes: int) -> LocalCluster:
        """All of its nodes are UP: what an earlier test has killed is started again. Earlier jobs are still there."""
        if self._cluster is not None and len(self._cluster.node_ids) == nodes:
            for node in self._cluster.node_ids:
                if not self._cluster.pids(node):
                    self._cluster.start(node)
            self._cluster.wait_up(self._cluster.node_ids, timeout_s=60.0)
            return self._cluster
        self.end()
        self._sizes.append(nodes)
        self._cluster = LocalCluster(self._folder / f"cluster-{len(self._sizes)}").__enter__()
        self._cluster.up(nodes, ram_budget="256MiB", settings={"keep_steps": 2})
        return self._cluster

    def end(self) -> None:
        """Take it down."""
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
            self._cluster = None


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], LocalCluster]]:
    """`shared_cluster(4)`: the file's cluster of four, for a test with a job of its own name that adds no node."""
    cluster = SharedCluster(tmp_path_factory.mktemp("shared"))
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def _standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("standing") / "cluster") as cluster:
        cluster.up(3, ram_budget="512MiB", settings={"keep_steps": 2})
        yield cluster


@pytest.fixture
def standing_cluster(_standing: LocalCluster) -> Iterator[LocalCluster]:
    """The file's cluster of three nodes, for tests that leave it as they found it."""
    before = {node: _standing.pids(node) for node in _standing.node_ids}
    yield _standing
    after = {node: _standing.pids(node) for node in _standing.node_ids}
    assert after == before, "a test of the standing cluster has ended or added processes"
