"""Who may call what: one table, and whom a caller may speak for. Pure.

A caller is what its certificate names, `spiffe://CLUSTER/fastcheck/ROLE/NAME`, or, in a trainer's calls, whom its token
names. Who comes through a Unix socket, or to a daemon without certificates, is `LOCAL` and may do all that has a rule,
except that where tokens are configured a trainer needs one. What has no rule nobody may call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DeniedError

NODE, ADMIN, TRAINER = "node", "admin", "trainer"
#: Of who shows a token. No certificate gives it.
BEARER = "token"
_ROLES = frozenset({NODE, ADMIN, TRAINER})
_SPIFFE = "spiffe://"


@dataclass(frozen=True)
class Caller:
    """Who makes a call."""

    #: `node`, `admin`, `trainer`, `token`; empty: local.
    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}" if self.role else self.name


LOCAL = Caller("", "local")

_ANY = _ROLES
_NODES = frozenset({NODE})
_ADMINS = frozenset({ADMIN})
_TRAINERS = frozenset({TRAINER, BEARER, ADMIN})
_NOBODY: frozenset[str] = frozenset()

#: Service → method → roles that may call it, besides `LOCAL`.
RULES: dict[str, dict[str, frozenset[str]]] = {
    "fastcheck.v1.NodeService": {
        "Describe": _ANY,
        "Probe": _NODES,
        "ProbeFor": _NODES,
        "BecomeVoter": _NODES,
    },
    "fastcheck.v1.DataControlService": dict.fromkeys(("Assume", "Hold"), _NOBODY),
    "fastcheck.v1.ObserveService": {"Scrape": _NOBODY},
    "fastcheck.v1.RegistryService": dict.fromkeys(
        (
            "Register", "Leave", "Heartbeat", "GetView", "WatchView", "OpenRank", "Place", "Report", "Lookup",
            "ListJobSteps", "ListJobs", "Corroborate", "ReportInventory", "SetDraining", "SafeToStop", "Forget",
            "History", "GetRedundancy", "ReplaceVoter", "AddVoters", "CloseRank", "DeleteSteps", "Supersede",
        ),
        _NODES,
    ),
    "fastcheck.v1.PeerService": dict.fromkeys(
        ("Replicate", "Open", "ListReplicas", "ReportCorrupt", "VerifyReplicas", "GetStats"),
        _NODES,
    ),
    "fastcheck.v1.TrainerService": dict.fromkeys(
        (
            "Session", "Upload", "ListSteps", "Load", "Pull", "Read", "Delete",
        ),
        _TRAINERS,
    ),
    "fastcheck.v1.AdminService": dict.fromkeys(
        (
            "Status", "Nodes", "Jobs", "Checkpoints", "Replicas", "Inspect", "Drain", "CheckStop", "ForgetNode",
            "NodeHistory", "ChangeVoter", "EnlargeVoters", "ListVoters", "Verify", "Delete",
        ),
        _ADMINS,
    ),
    "grpc.health.v1.Health": dict.fromkeys(("Check", "List", "Watch"), _ANY),
}  # fmt: skip


def _offering(request: Any) -> str | None:
    """Who offers a shard: its first source. The leader orders repairs on behalf of others."""
    return None if request.repair or not request.sources else str(request.sources[0].node.node_id)


#: Calls in which a node says who it is: a node says that of itself alone.
_SPEAKER: dict[str, Callable[[Any], str | None]] = {
    "/fastcheck.v1.RegistryService/Register": lambda request: request.node_id,
    "/fastcheck.v1.RegistryService/Leave": lambda request: request.node.node_id,
    "/fastcheck.v1.RegistryService/Heartbeat": lambda request: request.node.node_id,
    "/fastcheck.v1.RegistryService/OpenRank": lambda request: request.node.node_id,
    "/fastcheck.v1.RegistryService/Place": lambda request: request.owner.node_id,
    "/fastcheck.v1.RegistryService/Report": lambda request: request.record.owner.node_id,
    "/fastcheck.v1.RegistryService/Supersede": lambda request: request.owner.node_id,
    "/fastcheck.v1.RegistryService/ReportInventory": lambda request: request.node.node_id,
    "/fastcheck.v1.PeerService/Replicate": _offering,
    "/fastcheck.v1.PeerService/Open": lambda request: request.reader or None,
}


def names_a_speaker(method: str) -> bool:
    """Whether requests of a method (`/package.Service/Method`) say which node speaks."""
    return method in _SPEAKER


def is_for_others_than_nodes(method: str) -> bool:
    """Whether trainers or operators may call a method."""
    service, _, name = method.removeprefix("/").partition("/")
    return bool(RULES.get(service, {}).get(name, _NOBODY) - _NODES)


def may_show_token(who: Caller, method: str) -> bool:
    """Whether a token says who makes a call, rather than what is known by the connection."""
    return (who == LOCAL or who.role == TRAINER) and method.startswith("/fastcheck.v1.TrainerService/")


def caller(uris: Sequence[str], cluster_id: str) -> Caller:
    """Whom a verified certificate with these URIs in its SAN names.

    Raises:
        DeniedError: nobody of this cluster, or several at once.
    """
    ours = [uri for uri in uris if uri.startswith(_SPIFFE)]
    prefix = f"{_SPIFFE}{cluster_id}/fastcheck/"
    if len(ours) == 1 and ours[0].startswith(prefix):
        role, _, name = ours[0].removeprefix(prefix).partition("/")
        if role in _ROLES and name and "/" not in name:
            return Caller(role, name)
    raise DeniedError(
        f"this certificate names nobody of cluster {cluster_id}: it needs one URI in its SAN, {prefix}ROLE/NAME, with "
        "the role node, admin or trainer"
    )


def check_method(who: Caller, method: str) -> None:
    """Whether a caller may make a call, whatever it says.

    Raises:
        DeniedError: it may not.
    """
    service, _, name = method.removeprefix("/").partition("/")
    allowed = RULES.get(service, {}).get(name)
    if allowed is None:
        raise DeniedError(f"{method} has no rule, so nobody may call it")
    if who != LOCAL and who.role not in allowed:
        wanted = " or ".join(sorted(allowed - {BEARER})) or "local"
        raise DeniedError(f"{who} may not call {method}: show a certificate with the role {wanted}")


def check_speaker(who: Caller, method: str, request: Any, voters: Collection[str] = ()) -> None:
    """Whether a caller may say what a request says, of one node. Voters pass on what other nodes said to them.

    Raises:
        DeniedError: it speaks for another node.
    """
    if who == LOCAL or method not in _SPEAKER:
        return
    speaker = _SPEAKER[method](request)
    # A stream is a node's own line to each voter: nobody passes that on.
    passed_on = who.name in voters and not method.endswith("/Heartbeat")
    if speaker is not None and speaker != who.name and not passed_on:
        raise DeniedError(f"{who} may not speak for node {speaker[:128]!r}, only for itself")
