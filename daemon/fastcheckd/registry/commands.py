"""Commands that are made in more than one place, or of more than a request: what a leader proposes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from ..config import Voter
from .model import AnyRef, NodeState, Ref
from .records import REASON_BYTES_MAX
from .wire import voter_message


def noop() -> log_pb2.RegistryCommand:
    """Changes nothing; that it is committed proves that its proposer leads."""
    return log_pb2.RegistryCommand(noop=log_pb2.NoChange())


def set_state(node: AnyRef, state: NodeState, reason: str, *, at_ms: int = 0) -> log_pb2.RegistryCommand:
    """UP, DRAINING or DOWN. The reason may be any text; what does not fit is left out."""
    plain = "".join(c if c.isascii() and c.isprintable() else "?" for c in reason)
    change = log_pb2.NodeStateChange(
        node=Ref.of(node).message(), state=state, reason=plain[:REASON_BYTES_MAX]
    )
    return log_pb2.RegistryCommand(set_state=change, at_ms=at_ms)


def set_voters(voters: Iterable[Voter], *, at_ms: int = 0) -> log_pb2.RegistryCommand:
    """Name the voters that everyone goes by."""
    named = log_pb2.VoterList(voters=map(voter_message, voters))
    return log_pb2.RegistryCommand(set_voters=named, at_ms=at_ms)


def rehold(changes: Iterable[log_pb2.HolderChange]) -> log_pb2.RegistryCommand:
    """Committed shards have other holders: at most `records.CHANGES_MAX` changes."""
    return log_pb2.RegistryCommand(rehold=log_pb2.HolderChanges(changes=changes))
