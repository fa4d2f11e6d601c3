"""Completion: what is offered while one types, and that a silent daemon costs a moment and says nothing."""

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from fastcheck.cli import shell_completion
from fastcheck.cli.app import cli
from fastcheck.cli.offline_commands import SHELLS
from fastcheck.local import LocalCluster

PATIENCE_S = shell_completion.PATIENCE_S


@pytest.fixture(autouse=True)
def nobody_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTCHECK_ADDRESS", f"unix://{tmp_path}/no.sock")
    monkeypatch.setattr(shell_completion, "PATIENCE_S", 30.0)  # cores may be busy here


def offered(line):
    """What is offered at the end of a line; a blank at its end: for a new word."""
    *words, incomplete = shlex.split(line) + ([""] if line.endswith(" ") else [])
    complete = get_completion_class("bash")(cli, {}, "fastcheck", "_FASTCHECK_COMPLETE")
    return [item.value for item in complete.get_completions(words[1:], incomplete)]


def test_commands_and_options_are_offered_without_any_daemon():
    assert {"safe-to-stop", "status"} <= set(offered("fastcheck s"))
    assert offered("fastcheck local st") == ["start", "status"]
    assert offered("fastcheck replicas --st") == ["--step"]
    assert offered("fastcheck completion ") == list(SHELLS)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("fastcheck safe-to-stop node-", ["node-0", "node-1", "node-2"]),
        ("fastcheck drain node-2", ["node-2"]),
        ("fastcheck history ", ["node-0", "node-1", "node-2"]),
        ("fastcheck voters replace node-1 ", ["node-0", "node-1", "node-2"]),
        ("fastcheck checkpoints g", ["gpt"]),
        ("fastcheck checkpoints x", []),
        ("fastcheck delete ", ["gpt"]),
        ("fastcheck inspect gpt ", ["4", "5"]),
        ("fastcheck inspect other ", []),
        ("fastcheck verify gpt --step ", ["4", "5"]),
    ],
)
def test_names_are_those_that_the_daemon_knows(monkeypatch, address, line, wanted):
    monkeypatch.setenv("FASTCHECK_ADDRESS", address)
    assert offered(line) == wanted


def test_the_daemon_on_the_line_is_asked(address):
    assert offered(f"fastcheck checkpoints --address {address} ") == ["gpt"]


def test_a_node_that_hangs_does_not_cost_the_others_names(monkeypatch, address, world):
    world.hanging.add("node-1")
    monkeypatch.setenv("FASTCHECK_ADDRESS", address)
    assert offered("fastcheck forget ") == ["node-0", "node-1", "node-2"]


def test_nobody_there_is_nothing_to_offer(world, address, monkeypatch):
    assert offered("fastcheck checkpoints ") == []
    monkeypatch.setenv("FASTCHECK_ADDRESS", "no such: address")
    assert offered("fastcheck checkpoints ") == []
    monkeypatch.setenv("FASTCHECK_ADDRESS", address)
    world.no_quorum()
    assert offered("fastcheck checkpoints ") == []


def test_a_daemon_that_says_nothing_is_given_up_soon(monkeypatch):
    assert 0 < PATIENCE_S <= 2, "somebody is in the middle of a line"
    monkeypatch.setattr(shell_completion, "PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        assert offered(f"fastcheck drain --address 127.0.0.1:{listener.getsockname()[1]} ") == []
        assert time.monotonic() - began < 10


def test_nodes_of_the_local_cluster_need_no_daemon(monkeypatch, tmp_path):
    assert offered(f"fastcheck local kill --dir {tmp_path} ") == []
    monkeypatch.setattr(LocalCluster, "node_ids", property(lambda self: [f"node-0@{self.dir}", "x"]))
    assert offered(f"fastcheck local start --dir {tmp_path} node") == [f"node-0@{tmp_path}"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_for_each_shell(shell):
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0, done.output
    assert "_FASTCHECK_COMPLETE" in done.stdout and f"{shell}_complete" in done.stdout


def test_another_shell_is_wrong_usage():
    assert CliRunner().invoke(cli, ["completion", "tcsh"]).exit_code == 2


def test_bash_itself_offers_a_jobs_name(address, tmp_path):
    program = tmp_path / "fastcheck"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fastcheck "$@"\n')
    program.chmod(0o700)
    # More than once: on busy cores an answer may take longer than a person would wait.
    ask = (
        'eval "$(fastcheck completion bash)"; COMP_WORDS=(fastcheck checkpoints g); COMP_CWORD=2; '
        'for try in 1 2 3 4 5; do _fastcheck_completion fastcheck; [ -n "$COMPREPLY" ] && break; done; '
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", ask],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p),
            "FASTCHECK_ADDRESS": address,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "gpt", "")
