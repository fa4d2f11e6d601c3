"""The commands that change a cluster: what they say, when they ask, and how they exit."""

import json

import pytest
import yaml
from click.testing import CliRunner

from fastcheck.cli import maintenance_commands, options
from fastcheck.cli.app import cli
from fastcheck_proto.v1 import common_pb2, registry_pb2


@pytest.fixture
def run(address):
    def call(*arguments, text=None):
        environment = {"NO_COLOR": "1", "COLUMNS": "200", "FASTCHECK_ADDRESS": address}
        return CliRunner().invoke(cli, arguments, env=environment, input=text)

    return call


@pytest.fixture
def somebody_is_there(monkeypatch):
    monkeypatch.setattr(options, "is_interactive", lambda: True)


CHANGES = [
    ["drain", "node-1"],
    ["forget", "node-2"],
    ["voters", "replace", "node-1", "node-2"],
    ["voters", "add", "node-2"],
]


def changed(world):
    return bool(world.draining) or "node-2" not in world.states or "node-2" in world.voter_ids


@pytest.fixture
def down(world):
    world.states["node-2"] = registry_pb2.NODE_STATE_DOWN
    return world


@pytest.mark.parametrize("command", CHANGES)
def test_nobody_to_ask_is_wrong_usage_and_changes_nothing(run, down, command):
    result = run(*command, "-o", "json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--yes" in result.stderr
    assert not changed(down)


@pytest.mark.parametrize("command", CHANGES)
def test_a_no_changes_nothing(run, down, somebody_is_there, command):
    result = run(*command, "-o", "json", text="n\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Go on?" in result.stderr
    assert not changed(down)


@pytest.mark.parametrize("command", CHANGES)
def test_a_yes_does_it_and_json_stands_alone_on_stdout(run, down, somebody_is_there, command):
    result = run(*command, "-o", "json", text="y\n")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["schema_version"] == 1
    assert changed(down)


@pytest.mark.parametrize("command", CHANGES)
@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_with_yes_it_says_what_it_does_and_does_not_ask(run, down, command, form):
    result = run(*command, "--yes", "-o", form)
    assert result.exit_code == 0, result.stderr
    assert command[-1] in result.stderr and "Go on?" not in result.stderr
    assert result.stdout.strip() and changed(down)
    if form == "yaml":
        assert yaml.safe_load(result.stdout)["schema_version"] == 1


def test_an_undone_drain_needs_no_asking(run, world):
    world.draining.add("node-1")
    assert run("drain", "node-1", "--undo").exit_code == 0
    assert not world.draining


def test_safe_to_stop_exits_0_when_safe_5_when_survivable_and_4_when_neither(run, world):
    survivable = run("safe-to-stop", "node-1", "-o", "json")
    verdict = json.loads(survivable.stdout)
    keys = {"safe", "survivable", "reasons", "short_shards", "lost_shards", "jobs"}
    assert survivable.exit_code == 5 and keys <= set(verdict)
    world.survivable = False
    neither = run("safe-to-stop", "node-1")
    assert neither.exit_code == 4
    assert "not safe" in neither.stdout and "would have 1 copy" in neither.stdout and "gpt" in neither.stdout
    world.draining.add("node-1")
    world.polls_until_safe = 0
    assert run("safe-to-stop", "node-1").exit_code == 0
    assert run("safe-to-stop", "node-7").exit_code == 1


def test_drain_follows_until_the_node_may_be_stopped(run, world, monkeypatch):
    monkeypatch.setattr(maintenance_commands, "POLL_S", 0.01)
    world.polls_until_safe = 3
    result = run("drain", "node-1", "--yes", "--wait", "60", "-o", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"]["safe"] is True
    assert result.stderr.count("2 shards short") == 1, "the same is not said again"
    assert "node-1 may be stopped" in result.stderr


def test_a_drain_that_is_not_done_in_time_goes_on_and_says_so(run, world, monkeypatch):
    monkeypatch.setattr(maintenance_commands, "POLL_S", 0.01)
    world.polls_until_safe = 1_000_000
    result = run("drain", "node-1", "--yes", "--wait", "0.05", "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["verdict"]["survivable"]) == (5, True)
    assert "still being drained" in result.stderr
    assert world.draining == {"node-1"}


def test_a_refusal_is_one_line_and_exit_1(run):
    result = run("forget", "node-2", "--yes", "-o", "json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "fastcheck: node-2 is not DOWN: stop it first"


def test_verify_exits_5_when_something_bad_was_found(run, world):
    assert run("verify", "gpt").exit_code == 0
    world.bad = {"node-1": [common_pb2.ShardKey(job="gpt", step=5, rank=0, shard=2)]}
    result = run("verify", "gpt", "--step", "5")
    assert result.exit_code == 5
    world.bad = {}
    world.refusing.add("node-2")
    assert run("verify", "gpt").exit_code == 5, "what was not checked is not known to be good"
    world.bad = {"node-1": [common_pb2.ShardKey(job="gpt", step=5, rank=0, shard=2)]}
    result = run("verify", "gpt", "--step", "5")
    assert result.exit_code == 5
    assert "4 replicas checked" in result.stdout and "1 bad" in result.stdout
    assert "no answer from node-2" in result.stdout
    assert json.loads(run("verify", "gpt", "-o", "json").stdout)["bad"][0]["node_id"] == "node-1"


def test_tables_show_what_operators_look_for(run, world):
    nodes = run("nodes").stdout
    assert "registered" in nodes and "0.1 s" in nodes and "rack=r0, zone=z" in nodes
    history = run("history", "node-9").stdout
    assert "refused by all who asked" in history and "forgotten" in history and "node-0" not in history
    assert "leader" in run("voters").stdout.lower()
    world.redundancy = registry_pb2.GetRedundancyResponse(wanted_copies=2, short_shards=3, repairing=1)
    assert "3 shards (0 B) have fewer than 2; 1 copies are being made" in run("status").stdout
