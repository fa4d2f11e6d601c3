"""G1, when the owner's memory is full at the moment that its own copy would become findable: no commit counts on it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.harness import Job, counters, paused, process_of, until
from tests.cluster.test_full_tmpfs import mount

from fastcheck.admin import AdminClient

MEGABYTES = 12


def fill(path):
    """Take all that is left of a file system."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def holders(cluster, job, step):
    with AdminClient(cluster.address("node-0"), timeout_s=5) as admin:
        return {node for r in admin.replicas(job)["replicas"] if r["step"] == step for node in r["holders"]}


def test_a_step_whose_own_copy_cannot_be_published_is_not_committed_one_copy_short(make_cluster):
    cluster = make_cluster(3, keep_steps=1, codec="never", stall_after_s=60)
    ram_dir = Path(next(n["ram_dir"] for n in cluster.status()["nodes"] if n["node_id"] == "node-0"))
    cluster.kill("node-0", wipe=True)
    mount(ram_dir, size="64m")
    try:
        cluster.start("node-0")
        job = Job(cluster, ["node-0"], megabytes=MEGABYTES)
        job.commit(1)
        job.commit(2)
        others = [process_of(cluster, node, "data") for node in ("node-1", "node-2")]
        before = counters(cluster, "node-0")["peers_quarantined"]
        filler = ram_dir / "filler"
        with paused(*others):
            (handle,) = job.save(3)
            fill(filler)
        until(
            lambda: handle.done or "own copy cannot be published" in cluster.log_file("node-0").read_text(),
            "the copy to arrive at its holder",
        )
        if not handle.done:
            assert counters(cluster, "node-0")["peers_quarantined"] == before, "the holder is not to blame"
            filler.unlink()
        handle.result(timeout=30)
        for node in holders(cluster, job.name, 3):
            cluster.kill(node, wipe=True)
            cluster.start(node)
        job.start()
        assert job.load() == 3
        job.stop()
        cluster.kill("node-0")
    finally:
        subprocess.run(["umount", "--lazy", str(ram_dir)], check=True)
