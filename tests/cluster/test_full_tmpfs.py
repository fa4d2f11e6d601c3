"""A RAM file system that is smaller than the budget says: refused clearly, and nothing that was held is lost."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.cluster.harness import Job, make_state

from fastcheck import OutOfMemoryError


def mount(ram_dir: Path, size: str = "24m") -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    ram_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(ram_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")


def test_a_full_tmpfs_refuses_the_save_and_keeps_the_last_step(make_cluster):
    cluster = make_cluster(2)
    ram_dir = Path(next(n["ram_dir"] for n in cluster.status()["nodes"] if n["node_id"] == "node-0"))
    cluster.kill("node-0", wipe=True)
    mount(ram_dir)
    try:
        cluster.start("node-0")
        job = Job(cluster, ["node-0"], megabytes=6)
        job.commit(1)
        too_much = {"weights": make_state(1, 2, 0, megabytes=30)["model"]}
        handle = job.ranks[0].save(2, too_much)
        with pytest.raises(OutOfMemoryError, match="file system of"):
            handle.result(timeout=30)
        job.start()
        assert job.load() == 1
        job.commit(3)
        cluster.kill("node-0")
    finally:
        subprocess.run(["umount", "--lazy", str(ram_dir)], check=True)
