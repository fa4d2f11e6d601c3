"""A voter's files were damaged while it was down: it says so, leaves them alone and stays away; the others go on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.harness import Job, until

from fastcheck.local import LocalCluster
from fastcheck.local.cluster import LocalClusterError

DAMAGED = "node-2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("damaged") / "cluster") as cluster:
        cluster.up(3, ram_budget="64MiB")
        yield cluster


@pytest.fixture(scope="module")
def job(cluster: LocalCluster) -> Iterator[Job]:
    job = Job(cluster, ["node-0"], megabytes=0.01)
    job.commit(1)
    yield job
    job.stop()


def file_of(cluster: LocalCluster, name: str) -> Path:
    return cluster.dir / DAMAGED / "state" / "registry" / name


def refuses(cluster: LocalCluster, job: Job, path: Path, damaged: bytes, why: str) -> None:
    """With these bytes in a file the daemon ends, and with what was there before it starts."""
    before = {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    said = cluster.log_file(DAMAGED).stat().st_size
    try:
        path.write_bytes(damaged)
        with contextlib.suppress(LocalClusterError):  # unless its other processes were there before it ended
            cluster.start(DAMAGED)
        until(lambda: not cluster.pids(DAMAGED), f"{DAMAGED} to end")
        after = {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
        assert after == before | {path: damaged}, "what is damaged may still be of use to somebody"
        line = cluster.log_file(DAMAGED).read_text()[said:]
        assert re.search(why, line) and "Nothing was changed" in line and "fastcheck voters replace" in line
        job.commit(job.ranks[0].steps()[-1] + 1)
    finally:
        cluster.kill(DAMAGED)
        for file, content in before.items():
            file.write_bytes(content)
        cluster.start(DAMAGED)


def test_g3_a_byte_that_flipped_in_the_log_costs_nothing_behind_it(cluster: LocalCluster, job: Job) -> None:
    first = job.ranks[0].steps()[-1] + 1
    for step in range(first, first + 10):
        job.commit(step)
    cluster.kill(DAMAGED)
    path = file_of(cluster, "log")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    refuses(cluster, job, path, bytes(damaged), r"registry log .* is broken at byte \d+")


def test_g3_a_digit_that_changed_in_a_snapshot_is_found(cluster: LocalCluster, job: Job) -> None:
    path = file_of(cluster, "snapshot")
    until(path.exists, "a snapshot, which a new voter writes at once")
    cluster.kill(DAMAGED)
    whole = path.read_bytes()
    at = next(n for n in range(len(whole) // 2, len(whole)) if chr(whole[n]).isdigit())
    damaged = whole[:at] + (b"1" if whole[at : at + 1] != b"1" else b"2") + whole[at + 1 :]
    refuses(cluster, job, path, damaged, "registry snapshot .* cannot be used")


def test_a_snapshot_without_content_is_refused_with_advice_that_works(
    cluster: LocalCluster, job: Job
) -> None:
    """As a file system may leave it that renames a file before it has written it."""
    path = file_of(cluster, "snapshot")
    until(path.exists, "a snapshot, which a new voter writes at once")
    cluster.kill(DAMAGED)
    refuses(cluster, job, path, b"", "registry snapshot .* cannot be used")
    cluster.kill(DAMAGED)
    path.write_bytes(b"")
    file_of(cluster, "log").rename(file_of(cluster, "log.aside"))
    cluster.start(DAMAGED)
    assert "this node votes no more" in cluster.log_file(DAMAGED).read_text()
    job.commit(job.ranks[0].steps()[-1] + 1)
