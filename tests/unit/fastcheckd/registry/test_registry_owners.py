"""A job is the identity's that opened it first: in the registry's state, whatever the order of commands."""

from __future__ import annotations

import copy

import pytest
from tests.unit.fastcheckd.registry.small_cluster import again, apply, open_rank, refused, register

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.errors import DeniedError
from fastcheckd.registry.model import State, check_use, may_use
from fastcheckd.registry.view import job_view


def opening(identity, client="c", **more):
    return open_rank("j", 0, 1, client, ("n", 1), identity=identity, **more)


def opened(state, identity, client="c", replaces=None):
    return apply(state, opening(identity, client, replaces=replaces))


@pytest.fixture
def state():
    made = State()
    assert apply(made, register("n")).ok
    return made


def test_the_first_identity_owns_the_job_and_others_change_nothing(state):
    assert opened(state, "trainer/a").session == 1
    assert state.jobs["j"].owner == "trainer/a"
    before = copy.deepcopy(state)
    for stranger in ("trainer/b", "local", "node/n", "trainer/", "trainer/a/x", "admin"):
        for client in ("c", "d"):  # also with the client id that holds the seat
            no = refused(state, opening(stranger, client))
            assert no.code == pb.ERROR_CODE_DENIED and "belongs to trainer/a" in no.message
    assert state == before
    assert opened(state, "trainer/a", "d", replaces=1).session == 2


def test_an_operator_may_open_it_and_it_stays_its_owners(state):
    opened(state, "trainer/a")
    assert opened(state, "admin/o", "d", replaces=1).session == 2
    assert state.jobs["j"].owner == "trainer/a"


def test_a_job_that_nobody_says_he_owns_is_locals(state):
    assert opened(state, "").ok
    kept = again(state)
    assert kept.jobs["j"].owner == "local" == job_view(kept.jobs["j"], ()).owner
    assert opened(kept, "trainer/a").code == pb.ERROR_CODE_DENIED
    assert opened(kept, "", "d", replaces=1).session == 2


@pytest.mark.parametrize("identity", ["x" * 161, "a\nb", "\xe9"])
def test_an_identity_that_is_none_is_refused(state, identity):
    assert refused(state, opening(identity)).code == pb.ERROR_CODE_INVALID


def test_only_the_owner_and_operators_may():
    assert may_use("trainer/a", "trainer/a") and may_use("admin/x", "trainer/a") and may_use("local", "local")
    for identity in ("trainer/b", "trainer/A", "local", "administrator/x", ""):
        assert not may_use(identity, "trainer/a")
    with pytest.raises(DeniedError, match="belongs to trainer/a, and this is trainer/b"):
        check_use("trainer/b", "trainer/a", "j")
