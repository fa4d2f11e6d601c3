"""A RAM file system that is smaller than the budget says: refused clearly, and nothing that was held is lost."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.harness import Job, make_state, run_module, until

from fastcheck import OutOfMemoryError
from fastcheck.local import LocalCluster


def mount(ram_dir: Path, size: str = "24m") -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    ram_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(ram_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")


@contextlib.contextmanager
def on_small_tmpfs(cluster: LocalCluster, node: str) -> Iterator[Path]:
    """The node, empty, with its RAM directory in 24 MiB."""
    ram_dir = Path(next(n["ram_dir"] for n in cluster.status()["nodes"] if n["node_id"] == node))
    cluster.kill(node, wipe=True)
    mount(ram_dir)
    try:
        cluster.start(node)
        yield ram_dir
        cluster.kill(node)
    finally:
        subprocess.run(["umount", "--lazy", str(ram_dir)], check=True)


def test_a_full_tmpfs_refuses_the_save_and_keeps_the_last_step(make_cluster):
    cluster = make_cluster(2)
    with on_small_tmpfs(cluster, "node-0"):
        job = Job(cluster, ["node-0"], megabytes=6)
        job.commit(1)
        too_much = {"weights": make_state(1, 2, 0, megabytes=30)["model"]}
        handle = job.ranks[0].save(2, too_much)
        with pytest.raises(OutOfMemoryError, match="file system of"):
            handle.result(timeout=30)
        job.start()
        assert job.load() == 1
        job.commit(3)


def test_while_a_full_tmpfs_refuses_every_save_status_and_the_log_say_so(make_cluster):
    cluster = make_cluster(2)

    def failing():
        done = run_module("fastcheck", "status", "-o", "json", "--address", cluster.address("node-1"))
        codes = {code["code"]: code for code in json.loads(done.stdout)["codes"]}
        assert "SAVES_FAILING" not in codes or done.returncode == 5
        return codes.get("SAVES_FAILING")

    def lines():
        text = cluster.log_file("node-0").read_text().splitlines()
        return [line for line in text if "a save of rank 0 of job gpt is refused" in line]

    with on_small_tmpfs(cluster, "node-0") as ram_dir:
        full = ram_dir / "full"
        full.write_bytes(bytes(shutil.disk_usage(ram_dir).free - (2 << 20)))
        job = Job(cluster, ["node-0"], megabytes=6)
        for step in range(1, 11):
            assert isinstance(job.save(step)[0].exception(timeout=30), OutOfMemoryError)
        found = until(failing, "a health code")
        for part in ("job gpt", "node-0", "10 in a row", "file system of"):
            assert part in found["detail"], found
        assert 1 <= len(lines()) <= 3 and "file system of" in lines()[0], lines()

        full.unlink()
        job.commit(11)
        until(lambda: failing() is None, "the code to go")
        assert "over after" in lines()[-1] and "(10 times)" in lines()[-1]
        job.stop()
