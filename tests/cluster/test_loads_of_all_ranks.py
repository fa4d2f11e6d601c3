"""Loads of ranks that torch.distributed joins, each a process: one step for all, whatever was tried before."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.cluster import loading_ranks
from tests.cluster.resuming import Runs
from tests.forks import call

from fastcheck.connection import parse_address
from fastcheck.daemon import Daemon
from fastcheck.local import LocalCluster
from fastcheck.step_reader import StepReader

WORLD = 3
ANSWER_S = 90.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("loading") / "cluster") as cluster:
        cluster.up(WORLD, tolerate=1, ram_budget="256MiB")
        yield cluster


@pytest.fixture(scope="module")
def runs(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(cluster, tmp_path_factory.mktemp("runs"), ["tests.cluster.loading_ranks"])


def test_a_load_that_failed_on_one_rank_does_not_keep_the_next_ones_apart(runs):
    runs.run(loading_ranks.try_again, "try-again", 2, {}, None)


def test_ranks_of_a_process_group_that_load_again_have_given_up_what_was_under_way(runs):
    runs.run(loading_ranks.load_again_together, "again-together", 2, {}, None)


class Trainer:
    """A process of one rank that does what it is told."""

    def __init__(self, cluster: LocalCluster, job: str, rank: int, world_size: int) -> None:
        self.address = cluster.address(cluster.node_ids[rank])
        self.process = call(
            loading_ranks.obey,
            job,
            rank,
            world_size,
            self.address,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, what: str, step: int = 0) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps((what, step)) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        assert ready, f"no answer to {what} {step}"
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def name_of(request: pytest.FixtureRequest) -> str:
    """The job of a test."""
    return request.node.name[-60:].replace("_", "-").strip("-")


@pytest.fixture
def start(
    cluster: LocalCluster, runs: Runs, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Trainer]]:
    """Starts a rank's process, of a job of the test's own."""
    job = name_of(request)
    started: list[Trainer] = []

    def begin(rank: int, world_size: int = WORLD) -> Trainer:
        started.append(Trainer(cluster, job, rank, world_size))
        return started[-1]

    yield begin
    for trainer in started:
        trainer.kill()


def commit(ranks: list[Trainer], step: int) -> None:
    for rank in ranks:
        rank("save", step)
    assert [rank("result", step) for rank in ranks] == ["committed"] * len(ranks)


def replicate(ranks: list[Trainer], step: int) -> None:
    """Each rank's part of a step has its copies, and the other ranks' are missing."""
    for rank in ranks:
        rank("save", step)
        rank("replicated", step)


def test_ranks_that_start_one_after_the_other_load_one_step(start):
    """A node was lost, and its rank starts late: what it had reported does not commit with what others save anew."""
    ranks = [start(rank) for rank in range(WORLD)]
    commit(ranks, 1)
    replicate(ranks[1:], 2)
    for rank in ranks:
        rank.kill()
    again = [start(0), start(1)]
    loaded = []
    for rank in again:
        loaded.append(rank("load"))
        replicate([rank], 2)
    outcome = again[0]("result", 2)
    again.append(start(2))
    loaded.append(again[2]("load"))
    assert loaded == [1, 1, 1], outcome
    assert "SupersededError" in outcome and "rank 1" in outcome
    commit(again, 3)
    assert [rank("load") for rank in again] == [3, 3, 3]


def test_processes_that_load_again_load_one_step(start):
    """Two ranks go back to the newest step; the third one, which has yet to, saves meanwhile."""
    ranks = [start(rank) for rank in range(WORLD)]
    commit(ranks, 1)
    replicate(ranks[:2], 2)
    loaded = [rank("load") for rank in ranks[:2]]
    replicate(ranks[2:], 2)
    loaded.append(ranks[2]("load"))
    assert loaded == [1, 1, 1]
    assert "FencedError" in ranks[0]("result", 2)
    commit(ranks, 2)


def test_ranks_that_live_on_save_with_one_that_was_replaced(start):
    ranks = [start(rank) for rank in range(WORLD)]
    commit(ranks, 1)
    replicate(ranks[1:], 2)
    ranks[0].kill()
    ranks[0] = start(0)
    assert ranks[0]("load") == 1
    ranks[0]("save", 2)
    for rank in ranks[1:]:
        assert "SupersededError" in rank("result", 2)
    commit(ranks, 3)


def test_a_process_whose_place_was_taken_does_not_get_it_back_by_loading(start):
    ranks = [start(rank) for rank in range(WORLD)]
    commit(ranks, 1)
    old, ranks[0] = ranks[0], start(0)
    assert ranks[0]("load") == 1
    assert "FencedError" in old("load")
    commit(ranks, 2)


def test_a_job_of_one_process_that_loads_again_keeps_what_it_has_under_way(start):
    """There is no other rank that could load another step."""
    rank = start(0, world_size=1)
    commit([rank], 1)
    for step in range(2, 8):
        rank("save", step)
        assert rank("load") in (step - 1, step)
        assert rank("result", step) == "committed"


def test_who_only_reads_voids_nothing(start, request):
    """An evaluation beside the job, which takes no rank's place; and a rank that loads a step by its number."""
    ranks = [start(rank) for rank in range(WORLD)]
    commit(ranks, 1)
    replicate(ranks[1:], 2)
    daemon = Daemon(parse_address(ranks[0].address))
    with StepReader(daemon, name_of(request), timeout_s=60) as reader:
        assert reader.step == 1
    daemon.close()
    assert ranks[1]("load", 1) == 1
    ranks[0]("save", 2)
    assert [rank("result", 2) for rank in ranks] == ["committed"] * WORLD
