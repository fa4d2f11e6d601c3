"""`fastcheck top`: moments, their rates, and a cluster that stops to answer."""

import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from fastcheck.cli import top
from fastcheck.cli.app import cli
from fastcheck.cli.top import snapshot, view
from fastcheck.errors import DaemonUnavailableError
from fastcheck_proto.v1 import registry_pb2

STATUS = {"health": "OK", "codes": [], "leader": "node-0", "epoch": 7, "nodes_up": 2, "nodes_total": 2}


def node(name, *, sent=None, used=0, budget=100, state="UP", reachable=True):
    counters = {} if sent is None else {"bytes_sent": sent, "bytes_staged": 10 * sent}
    return {
        "node_id": name, "state": state, "incarnation": 1, "reachable": reachable, "voter": name == "a",
        "data": "OK", "ram_used_bytes": used, "ram_budget_bytes": budget, "heard_ms_ago": 70, "counters": counters,
    }  # fmt: skip


def job(newest):
    return {
        "job": "gpt",
        "world_size": 2,
        "newest_step": newest,
        "last_commit_at": "2026-01-01T00:00:00.000Z" if newest else None,
        "last_commit_age_s": 61.0 if newest else None,
        "kept_steps": [newest] if newest else [],
    }


def moment(*nodes, newest=None, at_s=0.0, before=None):
    return snapshot(STATUS, {"nodes": list(nodes)}, {"jobs": [job(newest)]}, at_s, before)


def shown(of, notice=""):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(view(of, notice))
    return console.export_text()


def test_rates_are_growth_per_second_since_the_moment_before():
    first = moment(node("a", sent=1000), newest=10, at_s=5.0)
    assert first["nodes"][0]["sent_bytes_per_s"] is None and first["jobs"][0]["steps_per_s"] is None
    second = moment(node("a", sent=3000), newest=15, at_s=7.0, before=first)
    assert second["nodes"][0]["sent_bytes_per_s"] == 1000
    assert second["nodes"][0]["staged_bytes_per_s"] == 10_000
    assert second["nodes"][0]["received_bytes_per_s"] is None  # nothing is known of it
    assert second["jobs"][0]["steps_per_s"] == 2.5


def test_what_counts_from_zero_again_or_is_new_has_no_rate():
    first = moment(node("a", sent=1000), newest=10, at_s=0.0)
    second = moment(node("a", sent=10), node("b", sent=99), newest=4, at_s=1.0, before=first)
    assert [n["sent_bytes_per_s"] for n in second["nodes"]] == [None, None]
    assert second["jobs"][0]["steps_per_s"] is None
    silent = moment(node("a", reachable=False), at_s=2.0, before=second)
    assert silent["nodes"][0]["sent_bytes_per_s"] is None


@pytest.mark.parametrize(("used", "cells"), [(0, 0), (50, 10), (100, 20), (250, 20)])
def test_a_bar_is_as_long_as_a_memory_is_full(used, cells):
    assert shown(moment(node("a", used=used))).count("█") == cells


def test_no_budget_no_job_and_no_node_are_shown_too():
    assert "no node has registered yet" in shown(moment())
    assert "no answer" in shown(moment(node("a", budget=0, reachable=False)))
    assert "this is old" in shown(moment(node("a")), "this is old")


def test_without_a_terminal_it_looks_twice_and_ends(address):
    result = CliRunner().invoke(cli, ["top", "--interval", "0.2", "-o", "json", "--address", address])
    assert result.exit_code == 0, result.output
    loaded = json.loads(result.stdout)
    assert [n["node_id"] for n in loaded["nodes"]] == ["node-0", "node-1", "node-2"]
    assert loaded["jobs"][0]["steps_per_s"] == 0  # a second look: there is a rate
    table = CliRunner().invoke(cli, ["top", "--interval", "0.2", "--count", "1", "--address", address])
    assert table.exit_code == 0 and "node-2" in table.stdout and "gpt" in table.stdout


def test_it_exits_as_status_does(address, world):
    world.states["node-2"] = registry_pb2.NODE_STATE_DOWN
    result = CliRunner().invoke(cli, ["top", "--count", "1", "--address", address])
    assert result.exit_code == 5, result.output
    nobody = CliRunner().invoke(cli, ["top", "--count", "1", "--timeout", "1", "--address", "127.0.0.1:1"])
    assert nobody.exit_code == 3


def test_a_cluster_that_stops_to_answer_keeps_its_last_moment_on_the_screen():
    seen = []
    screen = Console(width=140, file=io.StringIO(), force_terminal=True)

    def answers(before):
        seen.append(before)
        return moment(node("a"), at_s=0.0, before=before)

    def is_silent(before):
        raise DaemonUnavailableError("nobody is there")

    assert top._show_live(iter([answers, is_silent, answers]), screen)["health"] == "OK"
    assert "nobody is there" in screen.file.getvalue()
    assert seen[1] is not None  # rates go on from the last moment
    with pytest.raises(DaemonUnavailableError):
        top._show_live(iter([is_silent]), screen)
