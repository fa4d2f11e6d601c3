"""A local cluster of real daemons: up, kill, start, grow, down, and what is said when it goes wrong."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster, LocalClusterError

pytestmark = pytest.mark.timeout(150)


def run(*arguments):
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-m", "fastcheck", *arguments, "-o", "json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def alive(pids):
    """Which of them live; a container's init may take its time to bury the dead."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def states(cluster, node_id="node-0"):
    with AdminClient(cluster.address(node_id)) as client:
        return {n["node_id"]: n["state"] for n in client.nodes()["nodes"]}


def test_a_cluster_lives_and_leaves_nothing_but_logs(tmp_path):
    """Up by one command, killed by another, started again, grown, taken down: each a process of its own."""
    where = ["--dir", str(tmp_path / "c")]
    up = run(
        "local", "up", "--nodes", "3", "--tolerate", "2", "--ram-budget", "64MiB", "--codec", "always", *where
    )
    cluster = LocalCluster(tmp_path / "c")
    try:
        assert [n["node_id"] for n in up["nodes"]] == ["node-0", "node-1", "node-2"]
        ram_dirs = [Path(n["ram_dir"]) for n in up["nodes"]]
        assert all(d.is_dir() for d in ram_dirs)
        assert all(len(n["pids"]) == 4 for n in up["nodes"]), "parent, agent, data process, registry"
        assert (
            run("nodes", "--address", up["nodes"][1]["address"])["nodes"][0]["ram_budget_bytes"] == 64 << 20
        )
        assert "codec: always" in (tmp_path / "c" / "node-2" / "config.yaml").read_text()
        assert (tmp_path / "c" / "raft.key").stat().st_mode & 0o777 == 0o600

        killed = run("local", "kill", "node-1", "--wipe", *where)
        assert killed["nodes"][1]["pids"] == []
        assert sorted(killed["killed_pids"]) == sorted(up["nodes"][1]["pids"])
        assert alive(up["nodes"][1]["pids"]) == []
        assert [d.is_dir() for d in ram_dirs] == [True, False, True]
        assert cluster.status()["nodes"][1]["state"] == "stopped"

        started = run("local", "start", "node-1", *where)
        assert started["nodes"][1]["address"] == up["nodes"][1]["address"]
        assert states(cluster)["node-1"] == "UP"

        run("local", "start", "node-7", *where)
        assert states(cluster, "node-7")["node-7"] == "UP"
        with AdminClient(cluster.address("node-7")) as client:
            assert [n["voter"] for n in client.nodes()["nodes"]] == [True, True, True, False]
        all_pids = [pid for node_id in cluster.node_ids for pid in cluster.pids(node_id)]
        assert len(all_pids) == 15
    finally:
        run("local", "down", *where)
    assert alive(all_pids) == []
    assert not any(d.exists() for d in ram_dirs)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["daemon.log"] * 4 + ["lock"]


@pytest.fixture
def single(tmp_path):
    with LocalCluster(tmp_path / "single") as cluster:
        cluster.up(1, ram_budget="64MiB")
        yield cluster


def test_what_cannot_be_done_is_said(single):
    with pytest.raises(LocalClusterError, match="running in .* already"):
        single.up(1)
    with pytest.raises(LocalClusterError, match="node-0 is running already"):
        single.start("node-0")
    with pytest.raises(LocalClusterError, match="no node-5"):
        single.kill("node-5")
    with pytest.raises(LocalClusterError, match="cannot be added"):
        single.start("other")
    assert states(single) == {"node-0": "UP"}


def test_killing_twice_kills_nobody_the_second_time(single):
    pids = single.pids("node-0")
    assert len(LocalCluster(single.dir).kill("node-0")) == 4
    assert not psutil.pid_exists(pids[0]), "nor is a zombie of ours left"
    assert single.kill("node-0") == []
    assert Path(single.status()["nodes"][0]["ram_dir"]).is_dir(), "without --wipe the RAM stays"


def test_a_crashed_daemon_is_reported_and_replaced(single):
    daemon = single.pids("node-0")[0]
    os.kill(daemon, signal.SIGKILL)
    single.kill("node-0")  # whatever children the kernel has not ended yet
    single.start("node-0")
    assert single.pids("node-0")[0] != daemon
    assert states(single) == {"node-0": "UP"}


def test_a_daemon_that_cannot_start_shows_its_log_and_is_cleaned_up(tmp_path):
    cluster = LocalCluster(tmp_path / "bad")
    with pytest.raises(LocalClusterError, match="chunk_bytes") as caught:
        cluster.up(2, ram_budget="64MiB", settings={"chunk_bytes": 1})
    assert "ended while starting" in str(caught.value)
    assert not cluster.exists
    assert cluster.log_file("node-0").exists()


def test_too_many_losses_to_tolerate_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(LocalClusterError, match="tolerate 1 to 1"):
        LocalCluster(tmp_path / "c").up(2, tolerate=2)
    assert not (tmp_path / "c").exists()
