"""The guides' examples for PyTorch, Hugging Face, Lightning, Accelerate: killed, resumed, left without a daemon."""

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


def test_a_hugging_face_trainer_resumes_from_memory_that_is_newer_than_its_disk(cluster, tmp_path):
    is_killed_and_resumed(cluster, tmp_path, "hf_trainer.py", "hf", kill_at=27, committed=22, folders=True)


def test_a_lightning_trainer_resumes_from_memory_that_is_newer_than_its_disk(cluster, tmp_path):
    is_killed_and_resumed(
        cluster, tmp_path, "lightning_fit.py", "lightning", kill_at=27, committed=22, folders=True
    )


def test_an_accelerate_loop_resumes(cluster, tmp_path):
    is_killed_and_resumed(cluster, tmp_path, "accelerate_loop.py", "accelerate", kill_at=22, committed=18)
