"""The guides' examples for plain PyTorch: killed, resumed, and left without a daemon."""

from collections.abc import Iterator

import pytest
from tests.cluster.guides import is_killed_and_resumed

from fastcheck.local import LocalCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[LocalCluster]:
    """One for all examples: each is a job of its own, and the node that one kills is started again."""
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.up(2, tolerate=1, ram_budget="256MiB")
        yield cluster


def test_a_plain_loop_resumes_with_the_same_numbers_and_batches(cluster, tmp_path):
    is_killed_and_resumed(cluster, tmp_path, "plain.py", "plain", kill_at=20, committed=16)
