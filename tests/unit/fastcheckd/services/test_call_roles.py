"""The table of who may call what: whole, and nobody gets more than is written."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from fastcheck_proto.v1 import admin_pb2, node_pb2, observe_pb2, peer_pb2, registry_pb2, trainer_pb2
from fastcheckd.errors import DeniedError
from fastcheckd.services import roles
from fastcheckd.services.roles import (
    ADMIN,
    BEARER,
    LOCAL,
    NODE,
    TRAINER,
    Caller,
    caller,
    check_method,
    check_speaker,
)

MODULES = (admin_pb2, node_pb2, observe_pb2, peer_pb2, registry_pb2, trainer_pb2, health_pb2)
SERVICES = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
METHODS = {
    f"/{method.containing_service.full_name}/{method.name}": method for s in SERVICES for method in s.methods
}


def may(who: Caller, method: str) -> bool:
    try:
        check_method(who, method)
    except DeniedError:
        return False
    return True


def test_every_method_of_every_service_has_a_rule_and_no_rule_is_left_over():
    ruled = {f"/{service}/{method}" for service, methods in roles.RULES.items() for method in methods}
    # The health service's `List` is newer than the oldest package that we take.
    assert ruled - {"/grpc.health.v1.Health/List"} == set(METHODS) - {"/grpc.health.v1.Health/List"}


def test_what_has_no_rule_nobody_may_call():
    for method in ("/fastcheck.v1.AdminService/Explode", "/other.Service/Status", "", "/"):
        assert not may(LOCAL, method) and not may(Caller(ADMIN, "a"), method)


def test_roles_get_their_own_services_only():
    def of(role: str) -> set[str]:
        return {m.rpartition("/")[0] for m in METHODS if may(Caller(role, "x"), m)}

    common = {"/grpc.health.v1.Health", "/fastcheck.v1.NodeService"}
    assert of(NODE) == common | {"/fastcheck.v1.RegistryService", "/fastcheck.v1.PeerService"}
    assert of(TRAINER) == common | {"/fastcheck.v1.TrainerService"}
    assert of(ADMIN) == common | {"/fastcheck.v1.TrainerService", "/fastcheck.v1.AdminService"}
    assert of(BEARER) == {"/fastcheck.v1.TrainerService"}
    for role in (TRAINER, ADMIN):
        assert [m for m in METHODS if "NodeService" in m and may(Caller(role, "x"), m)] == [
            "/fastcheck.v1.NodeService/Describe"
        ]
    assert all(may(LOCAL, method) for method in METHODS if "List" not in method or "fastcheck" in method)


def test_a_request_that_names_a_node_as_its_speaker_is_checked():
    """Every message that has a field for its sender: a new one has to be thought of."""
    speaking = {"node", "owner"}
    found = {
        path
        for path, method in METHODS.items()
        if ("RegistryService" in path or "PeerService" in path)
        and speaking
        & {f.name for f in method.input_type.fields if f.message_type and f.message_type.name == "NodeRef"}
    }
    # It asks about a node that is silent.
    assert found - {"/fastcheck.v1.RegistryService/Corroborate"} <= set(roles._SPEAKER)


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://c/fastcheck/node/a"],
        ["spiffe://d/fastcheck/node/a"],
        ["spiffe://c/other/node/a"],
        ["spiffe://c/fastcheck/root/a"],
        ["spiffe://c/fastcheck/token/a"],
        ["spiffe://c/fastcheck/node/"],
        ["spiffe://c/fastcheck/node/a/b"],
        ["spiffe://c/fastcheck/node"],
        ["spiffe://c/fastcheck/node/a", "spiffe://c/fastcheck/node/b"],
        ["spiffe://c/fastcheck/node/a", "spiffe://d/fastcheck/node/a"],
    ],
)
def test_who_is_nobody_or_several_is_refused(uris):
    with pytest.raises(DeniedError, match="names nobody of cluster c"):
        caller(uris, "c")


def test_a_certificate_may_have_other_names_beside_its_own():
    assert caller(["https://x", "spiffe://c/fastcheck/trainer/t"], "c") == Caller(TRAINER, "t")


def test_a_node_speaks_for_itself_and_voters_pass_on_what_others_said():
    register = "/fastcheck.v1.RegistryService/Register"
    request = registry_pb2.RegisterRequest(node_id="b")
    check_speaker(Caller(NODE, "b"), register, request)
    check_speaker(Caller(NODE, "v"), register, request, voters={"v"})
    check_speaker(LOCAL, register, request)
    with pytest.raises(DeniedError, match="only for itself"):
        check_speaker(Caller(NODE, "a"), register, request, voters={"v"})
    beat = registry_pb2.HeartbeatRequest()
    beat.node.node_id = "b"
    with pytest.raises(DeniedError, match="only for itself"):
        check_speaker(Caller(NODE, "v"), "/fastcheck.v1.RegistryService/Heartbeat", beat, voters={"v"})
