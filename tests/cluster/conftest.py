"""Real clusters of real daemons on loopback.

Every test gets a cluster of its own: what it kills stays dead. A cluster is taken down with the test,
also when it fails; its logs are in pytest's temporary folder of the test.
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
