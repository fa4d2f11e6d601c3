"""A majority of the voters' machines is gone for good: what the commands say, and how the registry comes back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.harness import Job, leader, node_states, run_module, until

from fastcheck.local import LocalCluster
from fastcheck.local.ports import find_free_ports

RUNBOOK = Path(__file__).parents[2] / "docs" / "operating" / "quorum-lost.md"
VOTERS = ("node-0", "node-1", "node-2")
#: Of the voters, the one that is left; it is asked, and so is a node that never voted.
LEFT, LOST = "node-0", ("node-1", "node-2")
SPARE = "node-3"
#: For an answer that there is no quorum, and for the command's own start on a busy machine.
ANSWER_S = 5.0 + 3.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("lost") / "cluster") as made:
        made.up(5, ram_budget="256MiB")
        yield made


@pytest.fixture(scope="module")
def job(cluster: LocalCluster) -> Iterator[Job]:
    """Its trainers live through it all."""
    made = Job(cluster, ["node-3", "node-4"], "gpt")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def halted(cluster: LocalCluster, job: Job) -> LocalCluster:
    """The cluster after the loss."""
    for step in (1, 2):
        job.commit(step)
    for node in LOST:
        lose_machine(cluster, node)
    until(lambda: not leader(cluster, LEFT), "the leader to go")
    return cluster


def config_of(cluster: LocalCluster, node: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((cluster.dir / node / "config.yaml").read_text())
    return found


def remembered(cluster: LocalCluster, node: str) -> list[Any]:
    """The voters that a node's data process has heard of."""
    found: list[Any] = json.loads((Path(config_of(cluster, node)["state_dir"]) / "voters.json").read_text())[
        "voters"
    ]
    return found


def lose_machine(cluster: LocalCluster, node: str) -> None:
    """Everything of it is gone but the config, which its replacement would have."""
    cluster.kill(node, wipe=True)
    shutil.rmtree(config_of(cluster, node)["state_dir"])


def ask(cluster: LocalCluster, node: str, *words: str) -> dict[str, Any]:
    done = run_module("fastcheck", *words, "-o", "json", "--address", cluster.address(node))
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("asked", [LEFT, SPARE])
def test_no_dead_voter_is_shown_as_up(halted, asked):
    def states(kind: str, key: str) -> dict[str, str]:
        return {row["node_id"]: row["state"] for row in ask(halted, asked, kind)[key]}

    until(lambda: not {states("nodes", "nodes")[n] for n in LOST} & {"UP"}, "the dead to look dead")
    until(lambda: not {states("voters", "voters")[n] for n in LOST} & {"UP"}, "the dead to look dead")
    assert states("nodes", "nodes")[LEFT] == states("nodes", "nodes")[SPARE] == "UP"
    answers = {row["node_id"]: row["answers"] for row in ask(halted, asked, "voters")["voters"]}
    assert answers == {LEFT: True, LOST[0]: False, LOST[1]: False}


REFUSED = [
    (("voters", "replace", "node-1", "node-3"), LEFT),
    (("voters", "replace", "node-1", "node-3"), SPARE),
    (("voters", "add", "node-3", "node-4"), SPARE),
    (("drain", "node-3"), LEFT),
    (("drain", "node-3", "--wait", "60"), SPARE),
    (("drain", "node-3", "--undo"), LEFT),
    (("forget", "node-1"), SPARE),
]


@pytest.fixture(scope="module")
def refused(halted) -> list[tuple[subprocess.CompletedProcess[str], float]]:
    """What each command came to, and how long it took. They only wait, so all of them do so at once."""

    def ask_for(words: tuple[str, ...], asked: str) -> tuple[subprocess.CompletedProcess[str], float]:
        began = time.monotonic()
        done = run_module("fastcheck", *words, "--yes", "--address", halted.address(asked))
        return done, time.monotonic() - began

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask_for, *zip(*REFUSED, strict=True)))


@pytest.mark.parametrize(
    "index",
    range(len(REFUSED)),
    ids=[f"{' '.join(words)}-{asked}" for words, asked in REFUSED],
)
def test_a_change_fails_soon_and_says_why(refused, index):
    done, took_s = refused[index]
    assert done.returncode != 0 and not done.stdout
    assert took_s < ANSWER_S, done.stderr
    *before, why = done.stderr.strip().splitlines()
    assert "did not answer" in why and "majority" in why, done.stderr
    for claim in ("is no voter", "becomes", "is being drained", "is forgotten", "is taken off", "will get"):
        assert claim not in " ".join(before), "not before it is known"


def follow_runbook(cluster: LocalCluster) -> dict[str, str]:
    """Run its commands, in their order; returns what each has said."""
    said = {}
    commands = re.findall(r"```sh\n(.*?)```", RUNBOOK.read_text(), re.DOTALL)
    for line in "".join(commands).splitlines():
        words = line.replace("/etc/fastcheck/node.yaml", str(cluster.dir / LEFT / "config.yaml")).split()
        if words == ["systemctl", "stop", "fastcheckd"]:
            stop(cluster, LEFT)
            continue
        if words == ["systemctl", "start", "fastcheckd"]:
            cluster.start(LEFT)
            until(lambda: leader(cluster, SPARE) == LEFT, "the voter that is left to lead")
            continue
        if words[0] == "fastcheck":
            words += ["--address", cluster.address(SPARE)]
        if words[1] == "forget":
            lost = words[2]
            until(lambda lost=lost: node_states(cluster, SPARE)[lost] == "DOWN", f"{lost} to be DOWN")
            words.append("--yes")
        if words[1:3] == [
            "voters",
            "add",
        ]:  # all nodes have the same host here: the ports have to be told apart
            words += ["--yes", "-o", "json"]
            for option, port in zip(
                ["--registry-address", "--raft-address"] * 2, find_free_ports(4), strict=True
            ):
                words += [option, f"127.0.0.1:{port}"]
        done = run_module(*words)
        assert done.returncode == 0 or words[1] == "status", (line, done.stderr)
        said[line] = done.stdout
    return said


def stop(cluster: LocalCluster, node: str) -> None:
    os.kill(cluster.pids(node)[0], signal.SIGTERM)
    until(lambda: not cluster.pids(node), "the daemon to stop")


def test_g3_one_voter_that_is_left_goes_on_and_others_join_it(halted, job):
    during = job.save(3)
    until(lambda: all(handle.provisional for handle in during), "the step to be provisional")

    said = follow_runbook(halted)
    assert "nothing was changed" in said["fastcheckd recover-quorum --config /etc/fastcheck/node.yaml"]

    for handle in during:
        handle.result(timeout=60)  # saved without a quorum, committed now

    def answering() -> dict[str, bool]:
        return {row["node_id"]: row["answers"] for row in ask(halted, LEFT, "voters")["voters"]}

    until(lambda: answering() == {LEFT: True, "node-3": True, "node-4": True}, "three voters that answer")
    assert {row["node_id"] for row in ask(halted, SPARE, "nodes")["nodes"]} == {LEFT, "node-3", "node-4"}
    assert [row["step"] for row in ask(halted, SPARE, "checkpoints", "gpt")["checkpoints"]][-1] == 3
    job.commit(4)

    # A node that has not heard of them yet would know nobody to ask when the one that it knows is gone.
    until(
        lambda: all(len(remembered(halted, n)) == 3 for n in job.nodes), "the nodes to know the three voters"
    )
    # A quorum like any other: it survives the voter that it came from.
    halted.kill(LEFT)
    job.commit(5)
    halted.start(LEFT)
    until(lambda: all(row["answers"] for row in ask(halted, SPARE, "voters")["voters"]), "three voters")

    # The lost machines are replaced, with the voters that are to be in their config.
    now = json.loads(said["fastcheck voters add node-3 node-4"])["voters"]
    for node in LOST:
        path = halted.dir / node / "config.yaml"
        path.write_text(yaml.safe_dump(config_of(halted, node) | {"voters": now}, sort_keys=False))
        halted.start(node)
    job.commit(6)
    job.start()
    assert job.load() == 6
