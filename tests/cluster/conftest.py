"""Real clusters of real daemons on loopback.

A test gets a cluster of its own: what it kills stays dead. A cluster is taken down with the test,
also when it fails; its logs are in pytest's temporary folder of the test. Starting one costs more than most
tests do in it, so those of a file that hurt nobody may share one, each with a job of its own name.
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
            cluster.up(nodes, tolerate=tolerate, ram_budget=ram_budget, settings=settings)
            return cluster

        yield make


@pytest.fixture(scope="module")
def _standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("standing") / "cluster") as cluster:
        cluster.up(3, ram_budget="512MiB")
        yield cluster


@pytest.fixture
def standing_cluster(_standing: LocalCluster) -> Iterator[LocalCluster]:
    """The file's cluster of three nodes, for tests that leave it as they found it."""
    before = {node: _standing.pids(node) for node in _standing.node_ids}
    yield _standing
    after = {node: _standing.pids(node) for node in _standing.node_ids}
    assert after == before, "a test of the standing cluster has ended or added processes"
