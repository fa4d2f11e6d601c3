"""`fastcheck delete`: what it shows, when it asks, what it refuses, and how it exits."""

import json

import pytest
from click.testing import CliRunner

from fastcheck import InvalidArgumentError
from fastcheck.admin import AdminClient
from fastcheck.cli import options
from fastcheck.cli.app import cli
from fastcheck.errors import UnsafeError
from fastcheck_proto.v1 import registry_pb2


@pytest.fixture
def run(address):
    def call(*arguments, text=None):
        environment = {"NO_COLOR": "1", "COLUMNS": "200", "FASTCHECK_ADDRESS": address}
        return CliRunner().invoke(cli, ["delete", *arguments], env=environment, input=text)

    return call


@pytest.fixture
def somebody_is_there(monkeypatch):
    monkeypatch.setattr(options, "is_interactive", lambda: True)


def test_nobody_to_ask_is_wrong_usage_and_changes_nothing(run, world):
    result = run("gpt", "4", "-o", "json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--yes" in result.stderr and world.deletions == []


def test_the_plan_is_shown_before_it_is_asked_and_a_no_changes_nothing(run, world, somebody_is_there):
    result = run("gpt", "5", text="n\n")
    assert (result.exit_code, result.stdout) == (1, "")
    for word in ("step 5 of job gpt", "node-0", "node-1", "Left of job gpt: step 4", "Go on?"):
        assert word in result.stderr, word
    assert world.deletions == []


@pytest.mark.parametrize("answer", [["--yes"], []])
def test_a_yes_deletes_and_json_stands_alone_on_stdout(run, world, somebody_is_there, answer):
    result = run("gpt", "4", "-o", "json", *answer, text="y\n")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["deleted"] is True and found["deleted_steps"] == [4] and found["kept_steps"] == [5]
    assert found["stored_bytes"] == sum(node["stored_bytes"] for node in found["nodes"]) > 0
    (done,) = world.deletions
    assert (done.job, done.step, done.even_if_running) == ("gpt", 4, False)


def test_a_dry_run_shows_and_does_nothing(run, world):
    result = run("gpt", "--all", "--dry-run", "-o", "json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["deleted"] is False and found["deleted_steps"] == [4, 5] and found["kept_steps"] == []
    assert found["everything"] is True and found["refusal"] is None
    assert "would be deleted" in run("gpt", "--all", "--dry-run").stdout
    assert world.deletions == []


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_running_job_is_refused_with_the_reason_until_the_word_is_said(run, world, dry):
    world.running_ranks = [0, 1]
    result = run("gpt", "5", "--yes", "-o", "json", *dry)
    assert result.exit_code == 1 and "seems to be running" in result.stderr
    assert json.loads(result.stdout)["refusal"] == "job gpt seems to be running"
    assert world.deletions == []
    result = run("gpt", "5", "--even-if-running", "--yes")
    assert result.exit_code == 0 and "rank 0, 1 run" in result.stderr
    assert world.deletions[0].even_if_running


def test_an_older_step_of_a_running_job_needs_no_word(run, world):
    world.running_ranks = [0, 1]
    result = run("gpt", "4", "--yes")
    assert result.exit_code == 0 and "fenced" not in result.stderr and world.kept_steps == [5]


def test_what_is_not_kept_is_nothing_to_delete_and_nobody_is_asked(run, world):
    result = run("gpt", "7")
    assert result.exit_code == 0 and "step 7 of job gpt is not kept" in result.stdout
    assert "step 4, 5" in result.stdout and world.deletions == []


@pytest.mark.parametrize("arguments", [["gpt"], ["gpt", "4", "--all"], ["a/b", "4"], ["gpt", "-1"]])
def test_wrong_usage(run, world, arguments):
    assert run(*arguments, "--yes").exit_code == 2
    assert world.deletions == []


def test_nodes_that_were_not_reached_are_named(run, world):
    world.states["node-2"] = registry_pb2.NODE_STATE_DOWN
    result = run("gpt", "4", "--yes")
    assert result.exit_code == 0
    assert "Not reached: node-2" in result.stderr and "node-2" in result.stdout


def test_an_answer_that_was_lost_does_not_make_it_look_as_if_nothing_went(address, world):
    world.answer_is_lost = True
    with AdminClient(address) as client:
        assert client.delete("gpt", 4)["deleted_steps"] == [4]


def test_the_client_refuses_what_is_ambiguous_and_says_what_the_registry_says(address, world):
    world.running_ranks = [0]
    with AdminClient(address) as client:
        for step, everything in ((None, False), (4, True)):
            with pytest.raises(InvalidArgumentError):
                client.delete("gpt", step, everything=everything)
        with pytest.raises(UnsafeError, match="seems to be running"):
            client.delete("gpt", everything=True)
    assert world.deletions == []
