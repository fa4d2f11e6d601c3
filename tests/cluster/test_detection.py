"""Who is found dead, who is only suspected, and who is left in peace: real processes, killed and frozen."""

from __future__ import annotations

import contextlib
import re
import time

import psutil
import pytest
from tests.cluster.harness import (
    Job,
    counters,
    leader,
    node_states,
    paused,
    process_of,
    until,
)

from fastcheck import FastCheckError
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

NODES = ["node-0", "node-1", "node-2", "node-3"]


def agent_of(cluster, node):
    return process_of(cluster, node, "agent")


def lives(cluster, ask):
    """Node id → incarnation, in the registry's view."""
    with AdminClient(cluster.address(ask), timeout_s=5) as admin:
        return {n["node_id"]: n["incarnation"] for n in admin.nodes()["nodes"]}


def voters_answer(cluster, ask):
    """Whether each voter's registry process answers."""
    with AdminClient(cluster.address(ask), timeout_s=5) as admin:
        return [voter["answers"] for voter in admin.voters()["voters"]]


def seen_by(cluster, asked):
    """What each of these nodes is told about all nodes; those that get no answer now are left out."""
    seen = {}
    for node in asked:
        with contextlib.suppress(FastCheckError):
            seen[node] = node_states(cluster, node)
    return seen


def everyone_is_up(cluster, asked=NODES):
    seen = seen_by(cluster, asked)
    return len(seen) == len(asked) and all(set(states.values()) == {"UP"} for states in seen.values())


@pytest.fixture(scope="module")
def _four(tmp_path_factory):
    with LocalCluster(tmp_path_factory.mktemp("four") / "cluster") as cluster:
        cluster.up(len(NODES), ram_budget="256MiB")
        yield cluster


@pytest.fixture
def four(_four):
    """The file's cluster of four, for tests that leave all of its nodes up."""
    until(lambda: everyone_is_up(_four), "everyone to be UP")
    return _four


@pytest.mark.parametrize("victim", ["node-3", "a follower", "the leader"])
def test_a_killed_node_is_down_for_all_others_and_nobody_else_is(four, victim):
    cluster = four
    first = leader(cluster, "node-3")
    followers = [n for n in NODES[:3] if n != first]
    victim = {"a follower": followers[0], "the leader": first}.get(victim, victim)
    others = [n for n in NODES if n != victim]
    before = lives(cluster, others[0])
    cluster.kill(victim)

    def found_dead_by_all():
        seen = seen_by(cluster, others)
        for states in seen.values():
            assert all(states[n] != "DOWN" for n in others), "nobody else was condemned"
        return len(seen) == len(others) and all(states[victim] == "DOWN" for states in seen.values())

    until(found_dead_by_all, f"{victim} to be DOWN for all others")
    assert lives(cluster, others[0]) == before
    cluster.start(victim)
    until(lambda: everyone_is_up(cluster), "everyone to be UP again")
    after = lives(cluster, others[0])
    assert after[victim] > before[victim] and all(after[n] == before[n] for n in others)


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_voter_alone_judges_too(make_cluster, nodes):
    """Nobody else can be asked: its own question to the node is enough."""
    cluster = make_cluster(nodes)
    if nodes == 1:
        assert node_states(cluster, "node-0") == {"node-0": "UP"}
        return
    cluster.kill("node-1")
    until(lambda: node_states(cluster, "node-0") == {"node-0": "UP", "node-1": "DOWN"}, "node-1 to be DOWN")


def save_until(job, done, step):
    """Save step after step while something is done; returns the last step that was begun."""
    while not done():
        step += 1
        for handle in job.save(step):
            with contextlib.suppress(FastCheckError, TimeoutError):
                handle.result(timeout=1.0)
    return step


@pytest.mark.parametrize(
    "kind", ["agent", "data", pytest.param("follower", marks=pytest.mark.long), "leader"]
)
def test_a_process_stopped_for_five_seconds_under_saves_costs_no_step_and_condemns_nobody_else(four, kind):
    cluster = four
    job = Job(cluster, ["node-3"], f"stopped-{kind}")
    job.commit(1)
    before = lives(cluster, "node-3")
    first = leader(cluster, "node-3")
    followers = [n for n in NODES[:3] if n != first]
    if kind == "agent":
        node, victim = followers[0], agent_of(cluster, followers[0])
    elif kind == "data":
        node, victim = followers[0], process_of(cluster, followers[0], "data")
    else:
        node = first if kind == "leader" else followers[0]
        victim = process_of(cluster, node, "registry")
    condemned = set()

    def look():
        for states in seen_by(cluster, ["node-3"]).values():
            condemned.update(n for n, state in states.items() if state == "DOWN")

    with paused(victim):
        end = time.monotonic() + 5
        step = save_until(job, lambda: look() or time.monotonic() > end, 1)
    look()
    # An agent that says nothing and answers nobody is not to be told from a dead machine; all others live.
    assert condemned <= ({node} if kind == "agent" else set())
    until(lambda: everyone_is_up(cluster), "everyone to be UP")
    after = lives(cluster, "node-3")
    assert {n for n in NODES if after[n] != before[n]} == ({node} if kind == "agent" else set())
    newest = job.ranks[0].steps()[-1]
    assert newest >= 1
    job.commit(step + 1)
    job.start()
    assert job.load() == step + 1 > newest - 1


def test_a_frozen_data_process_is_suspect_never_down_and_started_anew_when_it_stays_so(make_cluster):
    cluster = make_cluster(4, data_hung_after_s=1.0)
    before = lives(cluster, "node-0")
    data = process_of(cluster, "node-3", "data")
    seen = []

    def state():
        seen.append(node_states(cluster, "node-0")["node-3"])
        return seen[-1]

    def called_hung():
        verdict = re.compile(r"node node-3 in incarnation \d+ is SUSPECT: DATA_HUNG")
        return any(verdict.search(cluster.log_file(n).read_text()) for n in NODES[:3])

    with paused(data):
        # From the leader's log: busy cores may keep this process from asking while it is so.
        until(lambda: state() and called_hung(), "the node to be SUSPECT")
        until(lambda: state() and not data.is_running(), "its agent to end the frozen process")

    def has_another():
        with contextlib.suppress(AssertionError, psutil.NoSuchProcess):  # there is none just now
            return process_of(cluster, "node-3", "data").pid != data.pid

    until(lambda: state() == "UP" and has_another(), "the node to be UP with a new data process")
    assert "DOWN" not in seen
    assert lives(cluster, "node-0") == before, "the node's life went on"
    log = cluster.log_file("node-3").read_text()
    assert "has made no progress" in log


def test_a_killed_data_process_makes_its_node_suspect_and_never_down(make_cluster):
    cluster = make_cluster(
        3, tolerate=2
    )  # both of the others hold it, also one that is slow to answer just then
    job = Job(cluster, ["node-2"], megabytes=16)
    job.commit(1)
    before = lives(cluster, "node-0")
    old = process_of(cluster, "node-1", "data")
    old.kill()
    old.wait(timeout=60)
    seen = []

    def is_back():
        seen.append(node_states(cluster, "node-0")["node-1"])
        return seen[-1] == "UP" and counters(cluster, "node-1").get("manifests_adopted")

    until(is_back, "node-1 to be UP with what it held")
    assert "DOWN" not in seen and lives(cluster, "node-0") == before


def test_a_frozen_registry_process_is_started_anew_when_it_stays_so(make_cluster):
    cluster = make_cluster(3, data_hung_after_s=1.0)
    job = Job(cluster, ["node-1", "node-2"])
    frozen = process_of(cluster, "node-2", "registry")
    # Its signs of life come once a second, and one that has given none yet is believed to be starting.
    until(lambda: all(voters_answer(cluster, "node-0")), "all registry processes to answer")
    answered_at = time.monotonic()
    until(lambda: time.monotonic() - answered_at > 4, "the process to have given signs of life")
    with paused(frozen):
        job.commit(1)  # two voters are a majority
        until(lambda: not frozen.is_running(), "its agent to end the frozen process")

    def votes_again():
        with contextlib.suppress(AssertionError, psutil.NoSuchProcess):  # there is none just now
            return process_of(cluster, "node-2", "registry").pid != frozen.pid

    until(votes_again, "a new registry process")
    cluster.kill("node-0")  # without the third there would be no majority any more
    job.commit(2)
    assert "the registry process" in cluster.log_file("node-2").read_text()
