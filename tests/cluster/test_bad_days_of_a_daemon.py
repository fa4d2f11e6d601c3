"""Ports that speak nonsense, bad configuration, stopping in good order: what an operator's bad day looks like."""

import subprocess
import sys

import psutil
import pytest
import yaml
from tests.cluster.harness import node_states, run_module, until

from fastcheck.local.ports import find_free_ports


def daemon(*arguments, **environment):
    return run_module("fastcheckd", *arguments, **environment)


def config_of(cluster, node):
    return cluster.dir / node / "config.yaml"


def test_sigterm_leaves_the_cluster_at_once_and_exits_with_zero(make_cluster):
    cluster = make_cluster(4)
    cluster.kill("node-3")
    until(lambda: node_states(cluster, "node-0")["node-3"] == "DOWN", "node-3 to be DOWN")
    # As systemd starts it: then the exit code is ours to see.
    command = [sys.executable, "-m", "fastcheckd", "run", "--config", str(config_of(cluster, "node-3"))]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
        try:
            until(lambda: node_states(cluster, "node-0")["node-3"] == "UP", "node-3 to be UP")
            children = psutil.Process(daemon.pid).children()
            assert children
            daemon.terminate()
            assert daemon.wait(timeout=30) == 0
        finally:
            daemon.kill()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert node_states(cluster, "node-0")["node-3"] == "DOWN"


def elsewhere(config, *keys):
    """The same configuration with other ports for these keys, and a registry of its own."""
    registry, raft, *ports = find_free_ports(2 + len(keys))
    voter = {
        "node_id": config["node_id"],
        "registry_address": f"127.0.0.1:{registry}",
        "raft_address": f"127.0.0.1:{raft}",
    }
    return config | dict(zip(keys, ports, strict=True)) | {"voters": [voter], "metrics_address": ""}


def test_a_port_in_use_is_named(make_cluster, tmp_path):
    cluster = make_cluster(1)
    config = yaml.safe_load(config_of(cluster, "node-0").read_text())
    config |= {k: str(tmp_path / k) for k in ("runtime_dir", "ram_dir")}
    second = tmp_path / "second.yaml"
    for key in ("agent_port", "data_port", "lane_port"):
        # A folder of its own each time: a voter's state_dir remembers its address.
        config |= {"state_dir": str(tmp_path / key)}
        others = [k for k in ("agent_port", "data_port", "lane_port") if k != key]
        second.write_text(yaml.safe_dump(elsewhere(config, *others)))
        done = daemon("run", "--config", second)
        assert done.returncode == 78
        assert key in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "named"), [("tolerrate: 1", "tolerrate"), ("keep_steps: 0", "keep_steps")])
def test_a_bad_config_stops_the_daemon_with_the_key(tmp_path, text, named):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    for command in ("run", "validate"):
        done = daemon(command, "--config", path)
        assert done.returncode == 78
        assert named in done.stderr and "Traceback" not in done.stderr


def test_validate_says_what_it_read(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text("node_id: n7\n")
    done = daemon("validate", "--config", path, FASTCHECK_CLUSTER_ID="blue")
    assert done.returncode == 0
    assert "n7" in done.stdout and "blue" in done.stdout


def test_a_second_daemon_on_the_same_ram_directory_is_refused(make_cluster, tmp_path):
    cluster = make_cluster(1)
    config = yaml.safe_load(config_of(cluster, "node-0").read_text())
    config = elsewhere(config, "agent_port", "data_port", "lane_port")
    config |= {k: str(tmp_path / k) for k in ("runtime_dir", "state_dir")}
    path = tmp_path / "second.yaml"
    path.write_text(yaml.safe_dump(config))
    done = daemon("run", "--config", path)
    assert done.returncode != 0
    assert config["ram_dir"] in done.stderr and "Traceback" not in done.stderr
