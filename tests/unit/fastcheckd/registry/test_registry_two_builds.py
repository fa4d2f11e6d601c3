"""While a cluster is upgraded, voters of this build and of the one before come to the same state by the same log."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import older_build
from tests.unit.fastcheckd.registry.small_cluster import RANKS, commit, open_rank, register
from tests.unit.fastcheckd.registry.test_registry_sequences import commands

from fastcheckd.registry import commands as commands_made
from fastcheckd.registry.owning import LOCAL
from fastcheckd.registry.state import SCHEMA, apply, new_state, restore, snapshot

#: The older build's state machine: a log in a line of JSON in; what it came to, and a snapshot of it, out.
MACHINE = """
import json, sys
from fastcheckd.registry.state import apply, new_state, restore, snapshot
for line in sys.stdin:
    begin, log = json.loads(line)
    state = new_state() if begin is None else restore(json.dumps(begin).encode())
    results = [apply(state, command)["ok"] for command in log]
    print(json.dumps([results, json.loads(snapshot(state))]), flush=True)
"""


@pytest.fixture(scope="module")
def older_machine(tmp_path_factory):
    build = older_build.extract(tmp_path_factory.mktemp("older"))
    process = subprocess.Popen(
        [sys.executable, "-c", MACHINE],
        env=build.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(begin, log):
        process.stdin.write(json.dumps([begin, log]) + "\n")
        process.stdin.flush()
        return process.stdout.readline().rstrip()

    yield run
    process.stdin.close()
    process.wait(10)


def run(begin, log):
    """The same here, as the same text: the order of keys is part of the state."""
    state = new_state() if begin is None else restore(json.dumps(begin).encode())
    results = [apply(state, command)["ok"] for command in log]
    return json.dumps([results, json.loads(snapshot(state))])


def state_in(answer):
    return json.loads(answer)[1]


def may_be_proposed(command):
    """By a leader of this build, as long as not all voters are of it: see `registry.agreeing`."""
    return not isinstance(command, dict) or (
        command.get("type") != "upgrade" and command.get("identity", LOCAL) == LOCAL
    )


#: What makes it likely that further commands are not all refused.
BEGIN = [
    *(register(f"n{number}") for number in range(3)),
    open_rank(rank=0, client="c0", node=("n0", 1)),
    open_rank(rank=1, client="c1", node=("n1", 2)),
    commit(5, RANKS),
]


@settings(max_examples=60)
@given(st.lists(commands.filter(may_be_proposed), max_size=15), st.integers(0, 15))
def test_every_log_of_a_mixed_cluster_leads_both_to_the_same_state(older_machine, more, half):
    """Also where a voter restarts in the middle as the other build, from the snapshot that this one wrote."""
    log = BEGIN + more
    wanted = run(None, log)
    assert older_machine(None, log) == wanted
    before, after = log[:half], log[half:]
    assert state_in(older_machine(state_in(run(None, before)), after)) == state_in(wanted)
    assert state_in(run(state_in(older_machine(None, before)), after)) == state_in(wanted)


def test_the_comparison_sees_what_only_one_build_knows(older_machine):
    opened = [register("n0"), open_rank()]
    assert older_machine(None, opened) == run(None, opened)
    for more in (commands_made.upgrade(SCHEMA), open_rank(job="other") | {"identity": "trainer/a"}):
        assert older_machine(None, [*opened, more]) != run(None, [*opened, more])
