"""A voter's state directory is full: it takes no part, the others go on, and it is back when there is room again."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.harness import Job, leader, node_states, paused, process_of, until
from tests.cluster.training import Training

from fastcheck.local import LocalCluster

NODES = ["node-0", "node-1", "node-2"]
#: What the node with the full disk may log meanwhile: that it is full, what ended for it, a line a minute.
LINES_MAX = 60


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own for a folder, small enough to be filled in no time."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path_factory.mktemp("full") / "cluster"
    with contextlib.ExitStack() as stack:
        for node in NODES:
            stack.enter_context(small_disk(folder / node / "state"))
        cluster = stack.enter_context(LocalCluster(folder))
        cluster.up(3, ram_budget="256MiB", tls=True)
        yield cluster


@pytest.fixture
def training(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Training]:
    job = Job(cluster, NODES, name=request.node.name, megabytes=0.01)
    training = Training(job)
    training.start()
    training.goes_on()
    yield training
    training.stopping.set()
    training.join(60)
    job.stop()


@contextlib.contextmanager
def filled(cluster: LocalCluster, node: str) -> Iterator[None]:
    """Not a byte is left on the disk of a node's state directory."""
    path = cluster.dir / node / "state" / "filler"
    try:
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1))
        yield
    finally:
        path.unlink()


def lines(cluster: LocalCluster, node: str) -> int:
    return len(cluster.log_file(node).read_text().splitlines())


def leads(cluster: LocalCluster, ask: str) -> str:
    return str(until(lambda: leader(cluster, ask), "a leader"))


def votes(cluster: LocalCluster, training: Training, voter: str, ask: str) -> None:
    """With another voter standing still, steps are committed only if this one takes part."""
    leading = leads(cluster, ask)
    other = next(node for node in NODES if node not in {leading, voter})
    until(lambda: process_is_there(cluster, voter), f"{voter}'s registry process")
    with paused(process_of(cluster, other, "registry")):
        training.goes_on(3)


def process_is_there(cluster: LocalCluster, node: str) -> bool:
    with contextlib.suppress(AssertionError):
        return process_of(cluster, node, "registry").is_running()
    return False


def test_g3_a_leader_with_a_full_disk_gives_way_and_comes_back(
    cluster: LocalCluster, training: Training
) -> None:
    full = leads(cluster, "node-0")
    healthy = next(node for node in NODES if node != full)
    before = lines(cluster, full)
    with filled(cluster, full):
        training.goes_on(10)
        assert leads(cluster, healthy) != full
        assert set(node_states(cluster, healthy).values()) == {"UP"}, "its node does everything else"
        assert "No space left" in cluster.log_file(full).read_text()
    votes(cluster, training, full, healthy)
    assert lines(cluster, full) - before <= LINES_MAX
    told = training.newest
    training.end()
    assert training.job.ranks[0].steps()[-1] >= told


def test_a_follower_with_a_full_disk_matters_to_nobody(cluster: LocalCluster, training: Training) -> None:
    leading = leads(cluster, "node-0")
    full = next(node for node in NODES if node != leading)
    before = lines(cluster, full)
    with filled(cluster, full):
        training.goes_on(10)
        assert leads(cluster, leading) == leading, "nobody else had to lead"
        assert set(node_states(cluster, leading).values()) == {"UP"}
    votes(cluster, training, full, leading)
    assert lines(cluster, full) - before <= LINES_MAX
    training.end()
