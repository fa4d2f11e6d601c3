"""What a cluster takes after many steps and many jobs, against what it took at the start.

Memory, threads and descriptors of every process, files on disk and in RAM, and how long a commit takes. Steps leave
nothing behind. A job that has a step is known to every node, and costs a little until it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from tests.cluster.harness import TimedJob, until

from fastcheck import Checkpointer
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

pytestmark = pytest.mark.alone

KIB, MIB = 1 << 10, 1 << 20
#: Of the start's, and a few milliseconds for a machine that has other work, too.
COMMIT_TIMES, COMMIT_NOISE_S = 1.1, 0.004
#: What each job that has a step adds to a commit of any job: views name them all.
COMMIT_PER_JOB_S = 0.0001


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster") as made:
        made.up(3, ram_budget="96MiB")
        yield made


@dataclass(frozen=True)
class Taken:
    """The most that any process or node has of each."""

    memory: int
    threads: int
    descriptors: int
    #: Journal and snapshot, and what else is in `state_dir`.
    disk: int
    #: Files in `ram_dir`.
    files: int

    @classmethod
    def of(cls, cluster: LocalCluster) -> Taken:
        configs = [
            yaml.safe_load((cluster.dir / node / "config.yaml").read_text()) for node in cluster.node_ids
        ]
        found = [psutil.Process(pid) for node in cluster.node_ids for pid in cluster.pids(node)]

        def files(key: str) -> list[list[Path]]:
            return [[f for f in Path(config[key]).rglob("*") if f.is_file()] for config in configs]

        return cls(
            memory=max(p.memory_info().rss - p.memory_info().shared for p in found),
            threads=max(p.num_threads() for p in found),
            descriptors=max(p.num_fds() for p in found),
            disk=max(sum(f.stat().st_size for f in each) for each in files("state_dir")),
            files=max(map(len, files("ram_dir"))),
        )


@pytest.mark.parametrize(
    ("saves", "jobs"),
    [(200, 30), pytest.param(2000, 300, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)
def test_many_tiny_saves_and_many_jobs_leave_nothing_that_grows(
    cluster: LocalCluster, saves: int, jobs: int
) -> None:
    with Checkpointer("gpt", rank=0, world_size=1, address=cluster.address("node-0")) as ckpt:
        job = TimedJob(ckpt)
        for _ in range(60):
            job.commit_s()
        start_s, start = job.median_s(), Taken.of(cluster)
        good_s = COMMIT_TIMES * start_s + COMMIT_NOISE_S

        for _ in range(saves):
            job.commit_s()
        saved_s, saved = job.median_at_most_s(good_s), Taken.of(cluster)
        print(f"at the start: {start_s * 1e3:.1f} ms, {start}")
        print(f"after {saves} saves: {saved_s * 1e3:.1f} ms, {saved}")
        assert saved_s <= good_s, (start_s, saved_s)
        assert saved.memory - start.memory < 4 * MIB
        assert saved.threads - start.threads <= 4 and saved.descriptors - start.descriptors <= 8
        assert saved.files - start.files <= 4
        # The journal is cut when it has 5,000 entries or 64 MiB.
        assert saved.disk - start.disk < (saves + 200) * KIB

        for number in range(jobs):
            address = cluster.address(f"node-{number % 3}")
            with Checkpointer(f"job-{number}", rank=0, world_size=1, address=address) as other:
                other.save(1, {"x": torch.ones(1000)}).result(timeout=60)
        good_s += jobs * COMMIT_PER_JOB_S
        opened_s, opened = job.median_at_most_s(good_s), Taken.of(cluster)
        print(f"with {jobs} jobs: {opened_s * 1e3:.1f} ms, {opened}")
        assert opened_s <= good_s, (start_s, opened_s)
        assert opened.memory - saved.memory < 4 * MIB + jobs * 32 * KIB
        assert opened.threads - saved.threads <= 8
        # A segment for what a rank saved, or one for each shard that is held.
        assert opened.descriptors - saved.descriptors <= 16 + 2 * jobs
        assert opened.disk - saved.disk < (jobs + 200) * 4 * KIB

        with AdminClient(cluster.address("node-0"), timeout_s=10) as admin:
            for number in range(jobs):
                admin.delete(f"job-{number}", everything=True)
        until(lambda: Taken.of(cluster).files <= saved.files + 4, "the deleted jobs' files to go")
        end_s, end = job.median_s(), Taken.of(cluster)
        print(f"when they are deleted: {end_s * 1e3:.1f} ms, {end}")
        assert end.descriptors - start.descriptors <= 16 and end.threads - start.threads <= 8
        assert end.memory - start.memory < 8 * MIB + jobs * 32 * KIB
