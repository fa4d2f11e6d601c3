"""What operators and their scripts get from the CLI, on a real cluster: shapes, states, exit codes."""

import json
import signal
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from tests import schemas
from tests.cluster.harness import Job, node_states, run_module, until
from tests.forks import popen

from fastcheck.cli import app
from fastcheck.demo import ranks


def cli(*arguments, **environment):
    return run_module("fastcheck", *arguments, **environment)


def asked(cluster, *arguments, rc=0):
    """The command's JSON, which is all of stdout."""
    done = cli(*arguments, "-o", "json", "--address", cluster.address("node-0"))
    assert done.returncode == rc, done.stderr
    return json.loads(done.stdout)


def test_every_question_has_the_answer_that_scripts_expect(shared_cluster):
    cluster = shared_cluster(4)
    job = Job(cluster, ["node-0", "node-1"], megabytes=10)
    for step in (1, 2, 3):
        job.commit(step)

    status = asked(cluster, "status")
    assert status["health"] == "OK" and status["codes"] == []
    assert status["nodes_up"] == status["nodes_total"] == 4
    assert status["leader"] in {"node-0", "node-1", "node-2"} and status["epoch"] >= 4

    nodes = asked(cluster, "nodes")["nodes"]
    keys = {"node_id", "state", "incarnation", "address", "voter", "ram_used_bytes", "ram_budget_bytes"}
    assert all(keys <= set(node) for node in nodes)
    assert [n["voter"] for n in nodes] == [True, True, True, False]

    assert [j["job"] for j in asked(cluster, "jobs")["jobs"]] == ["gpt"]

    checkpoints = asked(cluster, "checkpoints", "gpt")["checkpoints"]
    assert [(c["step"], c["state"], c["ranks"], c["copies"], c["lossy"]) for c in checkpoints] == [
        (2, "committed", 2, 1, False),
        (3, "committed", 2, 1, False),
    ]
    assert all(c["bytes"] > 20e6 for c in checkpoints)

    replicas = asked(cluster, "replicas", "gpt", "--step", 3)["replicas"]
    assert {r["rank"] for r in replicas} == {0, 1} and len(replicas) == 6
    for replica in replicas:
        assert replica["owner"] == f"node-{replica['rank']}"
        assert len(replica["holders"]) == 1 and replica["owner"] not in replica["holders"]
        assert len(replica["digest"]) == 32 and replica["verified_at"].endswith("Z")
    assert sum(r["bytes"] for r in replicas) == checkpoints[-1]["bytes"]

    inspected = asked(cluster, "inspect", "gpt", 3)
    assert inspected["step"] == 3


def test_exit_codes_for_what_cannot_be_asked(shared_cluster):
    cluster = shared_cluster(4)
    assert cli("status", "--address", "unix:///nowhere/fastcheckd.sock").returncode == 3
    assert cli("status", "--nonsense").returncode == 2
    done = cli("inspect", "gpt", "7", "-o", "json", "--address", cluster.address("node-0"))
    assert done.returncode == 1 and done.stdout == "" and "gpt" in done.stderr
    assert cli("checkpoints", "../x", "--address", cluster.address("node-0")).returncode in {1, 2}
    assert cli("nodes", FASTCHECK_ADDRESS=cluster.address("node-0")).returncode == 0


def test_a_dead_node_degrades_and_a_dead_quorum_is_critical(shared_cluster):
    """The last one on this cluster: its registry is gone afterwards."""
    cluster = shared_cluster(4)
    cluster.kill("node-3", wipe=True)
    until(lambda: node_states(cluster, "node-0")["node-3"] == "DOWN", "node-3 to be DOWN")
    status = asked(cluster, "status", rc=5)
    assert status["health"] == "DEGRADED" and "NODE_DOWN" in {c["code"] for c in status["codes"]}
    assert all(c["detail"] and c["do"] for c in status["codes"])
    for node in ("node-1", "node-2"):
        cluster.kill(node)
    until(lambda: cli("status", "--address", cluster.address("node-0")).returncode == 4, "CRITICAL")
    assert "NO_QUORUM" in {c["code"] for c in asked(cluster, "status", rc=4)["codes"]}


@pytest.mark.timeout(300)
def test_the_demo_resumes_bit_for_bit(tmp_path, monkeypatch):
    # In this process, so that its ranks may be forks; that it starts its own is tested without a cluster.
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(app.cli, ["demo", "-o", "json", "--steps", "5", "--kill-at", "3"])
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    assert done.exit_code == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    wanted = (
        "nodes, ranks, params, steps, killed_node, killed_at_step, restored_step, bit_identical, losses_identical, "
        "save_stall_ms, memcpy_ms, recovery_s, detection_s, bytes_raw, bytes_sent, ratio"
    )
    assert set(wanted.split(", ")) <= set(result)
    schemas.check("demo", result)
    assert result["bit_identical"] is True and result["losses_identical"] is True
    assert (result["nodes"], result["ranks"]) == (4, 4) and result["params"] >= 5_000_000
    assert 2 <= result["restored_step"] <= result["killed_at_step"] == 3
