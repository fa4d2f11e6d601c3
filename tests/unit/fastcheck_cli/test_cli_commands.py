"""The command line: exit codes, what is on stdout and what on stderr."""

import json
import re
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner

from fastcheck.cli.app import cli
from fastcheck.cli.output import dump, exit_for_health, human_age, human_bytes
from fastcheck.local import LocalCluster
from fastcheck_proto.v1 import registry_pb2
from fastcheck_proto.v1.peer_pb2 import RankMemory
from fastcheck_proto.v1.trainer_pb2 import MEMORY_CONTRACT_FULL, MEMORY_CONTRACT_LEAN


def run(*arguments, env=None):
    return CliRunner().invoke(cli, arguments, env={"NO_COLOR": "1", "COLUMNS": "160", **(env or {})})


def test_json_stands_alone_on_stdout_with_its_schema(address):
    result = run("nodes", "-o", "json", "--address", address)
    assert result.exit_code == 0
    assert result.stderr == ""
    loaded = json.loads(result.stdout)
    assert loaded["schema_version"] == 1
    assert [n["node_id"] for n in loaded["nodes"]] == ["node-0", "node-1", "node-2"]


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["nodes"],
        ["jobs"],
        ["checkpoints", "gpt"],
        ["replicas", "gpt"],
        ["inspect", "gpt", "5"],
        ["history"],
        ["history", "node-9", "--limit", "1"],
        ["voters"],
        ["verify", "gpt"],
        ["drain", "node-1", "--undo"],
    ],
)
def test_every_command_prints_table_json_and_yaml_of_the_same_thing(address, command):
    table = run(*command, "--address", address)
    assert table.exit_code == 0, table.output
    assert "\x1b" not in table.stdout
    as_json = run(*command, "--address", address, "-o", "json")
    as_yaml = run(*command, "--address", address, "-o", "yaml")
    assert json.loads(as_json.stdout) == yaml.safe_load(as_yaml.stdout)


def test_tables_say_what_matters(address, world):
    world.empty.add("node-1")
    assert "1.0 MiB" in run("nodes", "--address", address).stdout
    replicas = run("replicas", "gpt", "--step", "5", "--address", address).stdout
    assert "node-1 missing" in replicas
    status = run("status", "--address", address).stdout
    assert "REPLICA_SHORT" in status
    assert "3 of 3 up" in status


def test_a_partial_answer_says_whose_part_is_missing(address, world):
    world.refusing.add("node-1")
    for command in (["checkpoints", "gpt"], ["replicas", "gpt"], ["inspect", "gpt", "5"], ["verify", "gpt"]):
        assert "no answer from node-1" in run(*command, "--address", address).stdout, command
    assert re.search(r"node-1 +UP \(no answer\)", run("nodes", "--address", address).stdout)


def test_no_color_takes_the_colours_out_where_there_would_be_some(address):
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": ""}
    colour = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7]|38)")
    assert colour.search(run("nodes", "--address", address, env=terminal).stdout)
    assert not colour.search(run("nodes", "--address", address, env=terminal | {"NO_COLOR": "1"}).stdout)


def test_tables_show_what_is_lossy_and_how_much_smaller_it_travelled(address, world):
    world.lossy = {5}
    checkpoints = run("checkpoints", "gpt", "--address", address).stdout.splitlines()
    assert [line.split()[-1] for line in checkpoints if line.strip().startswith(("4", "5"))] == [
        "exact",
        "LOSSY",
    ]
    assert "LOSSY" in run("replicas", "gpt", "--step", "5", "--address", address).stdout
    inspected = run("inspect", "gpt", "5", "--address", address).stdout
    assert "LOSSY" in inspected and "3.00" in inspected and "adam 9 B → 3 B" in inspected
    assert "LOSSY" not in run("inspect", "gpt", "4", "--address", address).stdout


def test_inspect_shows_the_memory_contract(address, world):
    world.memory = [RankMemory(rank=0, contract=MEMORY_CONTRACT_FULL, segments=4, bytes=36 << 20)]
    assert "full (36.0 MiB)" in run("inspect", "gpt", "5", "--address", address).stdout
    world.memory[0].contract = MEMORY_CONTRACT_LEAN
    assert "lean (36.0 MiB)" in run("inspect", "gpt", "5", "--address", address).stdout


def test_tables_show_which_steps_are_parts_of_one_state(address, world):
    world.replicated = {5}
    checkpoints = run("checkpoints", "gpt", "--address", address).stdout.splitlines()
    steps = [line for line in checkpoints if line.strip().startswith(("4", "5"))]
    assert [("replicated" in line) for line in steps] == [False, True]
    assert "replicated" in run("inspect", "gpt", "5", "--address", address).stdout
    assert "replicated" not in run("inspect", "gpt", "4", "--address", address).stdout


def test_status_exits_5_when_degraded_and_4_when_critical(address, world):
    world.states["node-2"] = registry_pb2.NODE_STATE_DOWN
    assert run("status", "--address", address, "-o", "json").exit_code == 5
    world.no_quorum()
    assert run("status", "--address", address, "-o", "json").exit_code == 4


def test_an_error_is_one_line_on_stderr_and_exit_1(address):
    result = run("inspect", "gpt", "99", "--address", address, "-o", "json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("fastcheck: ")
    assert result.stderr.count("\n") == 1


def test_nobody_there_exits_3(tmp_path):
    result = run("status", "--address", f"unix://{tmp_path}/no.sock", "--timeout", "1", "-o", "json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "cannot reach a daemon" in result.stderr


def test_the_address_may_come_from_the_environment(address):
    assert run("status", env={"FASTCHECK_ADDRESS": address}).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["checkpoints"],
        ["checkpoints", "../etc"],
        ["inspect", "gpt", "five"],
        ["replicas", "gpt", "--step", "-1"],
        ["status", "-o", "xml"],
        ["status", "--timeout", "0"],
        ["history", "--limit", "0"],
        ["drain", "../x"],
        ["drain", "node-1", "--undo", "--wait", "3"],
        ["drain", "node-1"],
        ["forget", "node-1"],
        ["voters", "replace", "node-0"],
        ["voters", "replace", "node-0", "node-2"],
        ["verify"],
        ["plan"],
        ["plan", "--nodes", "1"],
        ["local", "up", "--nodes", "0"],
        ["local", "up", "--set", "novalue"],
        ["local", "up", "--codec", "sometimes"],
        ["completion", "tcsh"],
        ["config", "show", "--output", "xml"],
        ["demo", "--victim", "node-9"],
    ],
)
def test_wrong_usage_exits_2(arguments, tmp_path):
    extra = ["--dir", str(tmp_path)] if arguments[0] == "local" else []
    assert run(*arguments, *extra).exit_code == 2


def test_local_commands_without_a_cluster_say_how_to_get_one(tmp_path):
    result = run("local", "status", "--dir", str(tmp_path), "-o", "json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "fastcheck local up" in result.stderr
    assert run("local", "kill", "node-0", "--dir", str(tmp_path)).exit_code == 1
    down = run("local", "down", "--dir", str(tmp_path), "-o", "json")
    assert (down.exit_code, json.loads(down.stdout)["nodes"]) == (0, [])


def test_a_shell_takes_what_local_env_prints(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalCluster, "address", lambda self, node: f"unix://{self.dir}/{node}/a b.sock")
    done = run("local", "env", "node-2", "--dir", str(tmp_path))
    assert (done.exit_code, done.stderr) == (0, "")
    shell = ["sh", "-c", f'{done.stdout}printf %s "$FASTCHECK_ADDRESS"']
    told = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert told == f"unix://{tmp_path}/node-2/a b.sock"
    monkeypatch.undo()
    assert run("local", "env", "--dir", str(tmp_path)).exit_code == 1, "no cluster: nothing to use"


def test_a_demo_that_kills_after_its_end_is_refused():
    result = run("demo", "--steps", "6", "--kill-at", "6", "-o", "json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "2 to 5" in result.stderr


def test_without_click_the_entry_point_says_what_to_install():
    code = (
        "import sys; sys.modules['click'] = None\n"
        "from fastcheck.cli import main\n"
        "sys.argv = ['fastcheck', 'status']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'fastcheck[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_does_not_import_torch():
    code = "import fastcheck.cli.app, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(p for p in sys.path if p)}, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (150 << 20, "150 MiB"),
        (1023 << 20, "1.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def test_human_age():
    import datetime  # noqa: PLC0415

    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert human_age(None, now) == "never"
    assert human_age("2026-01-01T23:59:50Z", now) == "10 s"
    assert human_age("2026-01-01T21:00:00.5Z", now) == "3 h"
    assert human_age("2026-01-02T00:00:09Z", now) == "0 s"  # clocks differ between machines


def test_one_line_json_ends_with_its_only_newline():
    text = dump({"a": 1}, "json", one_line=True)
    assert text == '{"schema_version": 1, "a": 1}\n'


def test_unknown_health_is_never_ok():
    assert exit_for_health("SOMETHING") == 4
