"""A cluster ends with the process that it belongs to, however that ends; what `local up` started does not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.eventually import until

from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

pytestmark = pytest.mark.timeout(150)

#: Starts its cluster in a thread that ends: a cluster belongs to a process, not to a thread.
OWNER = """
import sys, threading
from fastcheck.local import LocalCluster
with LocalCluster(sys.argv[1]) as cluster:
    thread = threading.Thread(target=cluster.up, args=(2,), kwargs={"ram_budget": "64MiB"})
    thread.start()
    thread.join()
    print("up", flush=True)
    sys.stdin.read()
"""
UP = "from fastcheck.cli import main; main()"


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)}


@contextlib.contextmanager
def running(*command):
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def of_cluster(folder):
    """Processes that live and name the cluster's folder: daemons by their log, and the reaper by its command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            log = str(Path(f"/proc/{process.pid}/fd/2").readlink())
            if any(str(folder) in text for text in (log, *process.cmdline()[2:])) and alive(process.pid):
                found.append(process.pid)
    return found


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_is_left(folder, pids, ram_dirs):
    until(lambda: not any(map(alive, pids)), "daemons live on without their owner")
    until(lambda: not LocalCluster(folder).exists, "what daemons left was not removed")
    until(lambda: not of_cluster(folder), "something still runs")
    assert not any(ram_dir.exists() for ram_dir in ram_dirs)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_owner_leaves_neither_daemons_nor_memory(tmp_path, ending):
    folder = tmp_path / "c"
    with running(sys.executable, "-c", OWNER, str(folder)) as owner:
        assert owner.stdout.readline() == "up\n"
        nodes = LocalCluster(folder).status()["nodes"]
        pids = [pid for node in nodes for pid in node["pids"]]
        ram_dirs = [Path(node["ram_dir"]) for node in nodes]
        assert len(pids) == 7 and all(ram_dir.is_dir() for ram_dir in ram_dirs)
        with AdminClient(nodes[1]["address"]) as client:  # the thread that started them is gone
            assert {node["state"] for node in client.nodes()["nodes"]} == {"UP"}
        owner.send_signal(ending)
        owner.wait(10)
        assert_nothing_is_left(folder, pids, ram_dirs)
    said = (folder / "reaper.log").read_text().splitlines()
    assert said == [f"process {owner.pid} ended without taking its cluster down", "the cluster is down"]


def test_an_owner_that_ends_in_order_needs_nobody(tmp_path):
    folder = tmp_path / "c"
    with running(sys.executable, "-c", OWNER, str(folder)) as owner:
        assert owner.stdout.readline() == "up\n"
        owner.stdin.close()
        assert owner.wait(30) == 0
    assert of_cluster(folder) == []
    assert not (folder / "reaper.log").exists()


def test_a_command_killed_halfway_leaves_no_half_cluster(tmp_path):
    """SIGKILL when the first daemon runs: it may not even be recorded yet."""
    folder = tmp_path / "c"
    command = ["-c", UP, "local", "up", "--nodes", "3", "--ram-budget", "64MiB", "--dir", str(folder)]
    with running(sys.executable, *command) as up:

        def agents():
            return [pid for pid in of_cluster(folder / "node-0") if pid != up.pid]

        until(agents, "no daemon was started")
        first = agents()
        up.kill()
        up.wait(10)
        assert_nothing_is_left(folder, first, [])


def test_what_local_up_started_stays_up_without_it(tmp_path):
    folder = tmp_path / "c"
    command = [
        "-c",
        UP,
        "local",
        "up",
        "--nodes",
        "1",
        "--ram-budget",
        "64MiB",
        "--dir",
        str(folder),
        "-o",
        "json",
    ]
    try:
        with running(sys.executable, *command) as up:
            (node,) = json.loads(up.communicate(timeout=60)[0])["nodes"]
        assert sorted(of_cluster(folder)) == sorted(node["pids"]), "a reaper would take it down"
        with AdminClient(node["address"]) as client:
            assert client.nodes()["nodes"][0]["state"] == "UP"
    finally:
        LocalCluster(folder).down()
