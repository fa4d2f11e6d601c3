"""Raft's properties, each broken once: what is checked at every event of every run must be able to fail."""

from __future__ import annotations

import pytest
from tests.simulation.consensus import Consensus

FIRST = (b"\x01", 1, 0)


@pytest.fixture
def broken():
    """What was found not to hold, by property."""
    return []


@pytest.fixture
def logs(broken):
    """Those of three voters, which begin alike."""

    def check(ok, what, happened):
        if not ok:
            broken.append(what)

    consensus = Consensus(3, check)
    made = [consensus.log_of(name) for name in "abc"]
    for log in made:
        log.opened([FIRST], 1)
    return consensus, *made


def append(log, *entries, synced=True):
    for command, index, term in entries:
        log.added(index, term, command)
    if synced:
        log.synced = log.last


def test_two_leaders_of_one_term(logs, broken):
    consensus, a, b, _ = logs
    consensus.elected(3, a)
    consensus.elected(3, a)
    assert broken == []
    consensus.elected(3, b)
    assert broken == ["election safety"]


def test_the_same_index_and_term_with_another_command_or_another_past(logs, broken):
    _, a, b, c = logs
    append(a, (b"x", 2, 1), (b"y", 3, 2))
    append(b, (b"x", 2, 1), (b"y", 3, 2))
    assert broken == []
    append(c, (b"other", 2, 1))
    assert broken == ["log matching"]
    c.opened([FIRST], 1)
    append(c, (b"z", 2, 2))
    assert broken == ["log matching"], "another entry of another term is nothing wrong"
    append(c, (b"y", 3, 2))
    assert broken == ["log matching"] * 2


def test_a_gap(logs, broken):
    _, a, _, _ = logs
    append(a, (b"x", 3, 1))
    assert broken == ["log matching"]


def test_a_leader_without_what_was_committed_before_its_term(logs, broken):
    consensus, a, b, c = logs
    for log in (a, b):
        append(log, (b"x", 2, 1))
    consensus.elected(1, a)
    consensus.applied(a, 2, 1)
    consensus.elected(2, b)
    assert broken == []
    consensus.elected(3, c)
    assert broken == ["leader completeness"]


def test_another_entry_applied_at_the_same_index(logs, broken):
    consensus, a, b, c = logs
    for log in (a, b):
        append(log, (b"x", 2, 1))
    append(c, (b"y", 2, 2))
    consensus.applied(a, 2, 1)
    consensus.applied(b, 2, None)
    assert broken == []
    consensus.applied(c, 2, None)
    assert broken == ["state machine safety"]


def test_what_is_acknowledged_or_committed_before_it_is_on_enough_disks(logs, broken):
    consensus, a, b, _ = logs
    append(a, (b"x", 2, 1))
    append(b, (b"x", 2, 1), synced=False)
    consensus.acknowledged(b, 2, 1, 1)
    assert broken == ["durability"]
    consensus.applied(a, 2, 1)
    assert broken == ["durability"] * 2


def test_what_was_acknowledged_to_a_leader_is_deleted_while_it_leads(logs, broken):
    consensus, a, _, _ = logs
    append(a, (b"x", 2, 1), (b"y", 3, 1))
    consensus.acknowledged(a, 3, 1, 1)
    a.cut([FIRST, (b"x", 2, 1)], 2, term=2)
    assert broken == [], "another leader may have others there"
    append(a, (b"y", 3, 1))
    a.cut([FIRST, (b"x", 2, 1)], 2, term=1)
    assert broken == ["durability"]
