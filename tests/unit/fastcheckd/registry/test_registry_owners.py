"""A job is the identity's that opened it first: in the registry's state, through versions and orders of commands."""

from __future__ import annotations

import json

import pytest

from fastcheckd.errors import DeniedError
from fastcheckd.registry import commands
from fastcheckd.registry.owners import check_use, may_use, owner_of
from fastcheckd.registry.state import apply, new_state, restore, snapshot
from fastcheckd.registry.view import job_view

NODE = {
    "node_id": "n",
    "agent_address": "h:1",
    "data_address": "h:2",
    "lane_address": "h:3",
    "voter": False,
    "ram_budget_bytes": 1,
    "labels": {},
}


def opened(state, identity, client="c", replaces=None):
    command = commands.open_rank(
        "j",
        0,
        1,
        client=client,
        node=("n", 1),
        replaces=replaces,
        **({"identity": identity} if identity else {}),
    )
    return apply(state, command)


@pytest.fixture
def state():
    made = new_state()
    assert apply(made, commands.register(NODE, "life", at_ms=1))["ok"]
    return made


def test_the_first_identity_owns_the_job_and_others_change_nothing(state):
    assert opened(state, "trainer/a")["session"] == 1
    assert owner_of(state["jobs"]["j"]) == "trainer/a"
    before = json.dumps(state)
    for stranger in ("trainer/b", "local", "node/n", "trainer/", "trainer/a/x", "admin"):
        for client in ("c", "d"):  # also with the client id that holds the seat
            refused = opened(state, stranger, client)
            assert (refused["ok"], refused["code"]) == (False, "DENIED")
            assert "belongs to trainer/a" in refused["message"]
    assert json.dumps(state) == before
    assert opened(state, "trainer/a", "d", replaces=1)["session"] == 2


def test_an_operator_may_open_it_and_it_stays_its_owners(state):
    opened(state, "trainer/a")
    assert opened(state, "admin/o", "d", replaces=1)["session"] == 2
    assert owner_of(state["jobs"]["j"]) == "trainer/a"


def test_jobs_and_commands_of_earlier_versions_are_locals(state):
    command = commands.open_rank("j", 0, 1, client="c", node=("n", 1))
    del command["identity"]
    assert apply(state, command)["ok"]
    assert "owner" not in state["jobs"]["j"], "as in the state of a voter of such a version"
    kept = restore(snapshot(state))
    assert owner_of(kept["jobs"]["j"]) == "local" == job_view("j", kept["jobs"]["j"], ()).owner
    assert opened(kept, "trainer/a")["code"] == "DENIED"
    assert opened(kept, "", "d", replaces=1)["session"] == 2


@pytest.mark.parametrize("identity", ["", "x" * 161, 7, None, ["trainer/a"]])
def test_an_identity_that_is_none_is_refused(state, identity):
    command = commands.open_rank("j", 0, 1, client="c", node=("n", 1)) | {"identity": identity}
    assert apply(state, command)["code"] == "INVALID" and not state["jobs"]


def test_only_the_owner_and_operators_may():
    assert may_use("trainer/a", "trainer/a") and may_use("admin/x", "trainer/a") and may_use("local", "local")
    for identity in ("trainer/b", "trainer/A", "local", "administrator/x", ""):
        assert not may_use(identity, "trainer/a")
    with pytest.raises(DeniedError, match="belongs to trainer/a, and this is trainer/b"):
        check_use("trainer/b", "trainer/a", "j")
