"""The command line on a real cluster: every JSON output as its schema says, and names that a shell is offered.

In this process, against real daemons: starting Python for each question would cost more than the questions.
"""

import json

import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner
from tests import schemas
from tests.cluster.harness import Job

from fastcheck.cli.app import cli


@pytest.fixture(scope="module")
def job(_standing):
    job = Job(_standing, ["node-0", "node-1"], name="cli")
    for step in (1, 2, 3):
        job.commit(step)
    yield job
    job.stop()


@pytest.fixture
def asked(standing_cluster):
    def ask(*arguments, codes=(0,)):
        done = CliRunner().invoke(
            cli, [*arguments, "-o", "json"], env={"FASTCHECK_ADDRESS": standing_cluster.address("node-1")}
        )
        assert done.exit_code in codes, done.output
        result = json.loads(done.stdout)
        schemas.check(schemas.of_command(arguments[0]), result)
        return result

    return ask


def test_every_answer_is_as_its_schema_says(asked, job, standing_cluster):
    assert asked("jobs")["jobs"][0]["newest_step"] == 3
    assert {c["step"] for c in asked("checkpoints", "cli")["checkpoints"]} == {2, 3}
    assert asked("replicas", "cli", "--step", "3")["replicas"]
    assert asked("inspect", "cli", "3")["ranks"]
    assert asked("verify", "cli", "--timeout", "60")["checked"] > 0
    assert asked("history")["transitions"]
    assert len(asked("voters")["voters"]) == 3
    # A node that is slow to answer on busy cores makes these say so: which is an answer, too.
    assert asked("status", codes=(0, 4, 5))["nodes_total"] == 3
    assert any(node["lane"] for node in asked("nodes")["nodes"])
    assert asked("top", "--interval", "0.2", codes=(0, 4, 5))["jobs"]
    # Three nodes hold two copies of all: without one of them some shards have one.
    assert asked("safe-to-stop", "node-2", codes=(0, 4, 5))["node_id"] == "node-2"
    assert asked("drain", "node-2", "--yes")["draining"] is True
    verdict = asked("drain", "node-2", "--yes", "--wait", "0.1", codes=(0, 4, 5))["verdict"]
    assert verdict["node_id"] == "node-2"
    assert asked("drain", "node-2", "--undo")["draining"] is False
    assert asked("delete", "cli", "2", "--yes")["deleted_steps"] == [2]
    local = asked("local", "status", "--dir", str(standing_cluster.dir))
    assert [node["state"] for node in local["nodes"]] == ["running"] * 3


def test_a_shell_is_offered_what_the_cluster_knows(monkeypatch, job, standing_cluster):
    monkeypatch.setenv("FASTCHECK_ADDRESS", standing_cluster.address("node-2"))
    monkeypatch.setattr("fastcheck.cli.shell_completion.PATIENCE_S", 30.0)  # cores may be busy here
    complete = get_completion_class("bash")(cli, {}, "fastcheck", "_FASTCHECK_COMPLETE")

    def offered(*words):
        return [item.value for item in complete.get_completions([*words[:-1]], words[-1])]

    assert offered("drain", "node-") == ["node-0", "node-1", "node-2"]
    assert offered("inspect", "c") == ["cli"]
    assert offered("inspect", "cli", "3") == ["3"]
    assert offered("local", "kill", "--dir", str(standing_cluster.dir), "") == ["node-0", "node-1", "node-2"]
