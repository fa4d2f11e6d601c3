"""Loads of ranks that torch.distributed joins, each a process: one step for all, whatever was tried before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster import loading_ranks
from tests.cluster.resuming import Runs

from fastcheck.local import LocalCluster


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("loading")
    with LocalCluster(folder / "cluster") as cluster:
        cluster.up(2, tolerate=1, ram_budget="256MiB")
        yield Runs(cluster, folder, ["tests.cluster.loading_ranks"])


def test_a_load_that_failed_on_one_rank_does_not_keep_the_next_ones_apart(runs):
    runs.run(loading_ranks.try_again, "try-again", 2, {}, None)
