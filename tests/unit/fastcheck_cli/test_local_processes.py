"""Ending processes: all of a node's, and nobody else's."""

import os
import subprocess
import sys

import psutil
import pytest
from tests.eventually import until

from fastcheck.local.processes import (
    ProcessRef,
    daemon_environment,
    kill_all,
    node_processes,
    python_path,
    tail,
)

#: An "agent" with a child and a grandchild. The name is what tells a node's processes from others in a session.
TREE = """
import subprocess, sys, time
if sys.argv[2] != "0":
    subprocess.Popen([sys.executable, "-c", sys.argv[3], "fastcheckd", str(int(sys.argv[2]) - 1), sys.argv[3]])
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def tree():
    """A running tree of three processes."""
    agent = subprocess.Popen(
        [sys.executable, "-c", TREE, "fastcheckd", "2", TREE], stdout=subprocess.PIPE, start_new_session=True
    )
    ref = ProcessRef.of(agent.pid)
    until(lambda: len(node_processes(ref)) == 3)
    yield agent, ref
    kill_all(ref)
    agent.wait(10)
    agent.stdout.close()


def test_kill_all_leaves_nothing(tree):
    agent, ref = tree
    pids = [p.pid for p in node_processes(ref)]
    assert pids[0] == agent.pid
    assert sorted(kill_all(ref)) == sorted(pids)
    assert node_processes(ref) == []
    agent.wait(10)
    assert not any(psutil.pid_exists(pid) for pid in pids[1:] if not zombie(pid))


def test_children_of_a_dead_agent_are_found_by_their_session(tree):
    agent, ref = tree
    agent.kill()
    until(lambda: ref.find() is None)
    assert len(node_processes(ref)) == 2, "while the agent is a zombie"
    agent.wait(10)
    assert len(node_processes(ref)) == 2, "when its id is free"
    assert len(kill_all(ref)) == 2


def test_a_recycled_id_is_not_the_agent(tree):
    agent, ref = tree
    earlier = ProcessRef(agent.pid, ref.started_at_s - 100)
    assert earlier.find() is None
    assert node_processes(earlier) == []
    assert kill_all(earlier) == []
    assert agent.poll() is None


def test_a_stranger_in_the_session_is_left_alone():
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as stranger:
        try:
            stranger.stdout.readline()
            gone = ProcessRef(stranger.pid, 0)
            assert kill_all(gone) == []
            assert stranger.poll() is None
        finally:
            stranger.kill()


def zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_daemons_environment_cannot_override_its_own_config(monkeypatch):
    monkeypatch.setenv("FASTCHECK_NODE_ID", "elsewhere")
    monkeypatch.setenv("FASTCHECK_KEEP_STEPS", "9")
    environment = daemon_environment(["node_id", "agent_port"])
    assert "FASTCHECK_NODE_ID" not in environment
    assert environment["FASTCHECK_KEEP_STEPS"] == "9"


def test_children_find_the_packages_that_this_process_found():
    path = python_path(("fastcheckd", "fastcheck_proto"), {})
    code = "import fastcheckd, fastcheck_proto"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, cwd="/", check=False)
    assert done.returncode == 0


def test_inherited_python_path_becomes_absolute():
    path = python_path(("fastcheck_proto",), {"PYTHONPATH": "lib::/opt/x"})
    assert path.split(os.pathsep)[1:] == [os.path.abspath("lib"), "/opt/x"]  # noqa: PTH100


def test_a_missing_package_is_named():
    with pytest.raises(ModuleNotFoundError, match="nonexistent_package"):
        python_path(("nonexistent_package",), {})


def test_tail_gives_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(10_000)))
    assert tail(log, lines=2) == "line 9998\nline 9999"
    assert tail(tmp_path / "none") == ""
