"""Who the voters are, according to the log: pure.

A change is an entry of the log, and counts from the moment it is in the log, committed or not: a voter that
went by an older list could elect a leader beside the one of the newer list. What the config names is only
where it starts. One server is added or removed at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fastcheck_proto.v1 import node_pb2

from ...config import Voter

#: The voters by raft address.
Voters = dict[str, Voter]


@dataclass(frozen=True)
class Change:
    """One server more, or one less."""

    kind: Literal["add", "rem"]
    voter: Voter

    def to_request(self) -> list[Any]:
        """As pysyncobj has it in an entry: kind, id, node; plain values only."""
        return [self.kind, self.voter.raft_address, voter_to_list(self.voter)]

    @classmethod
    def from_request(cls, request: Any) -> Change:
        """Inverse of `to_request`; raises ValueError when it is nothing of the kind."""
        kind, address, record = request
        voter = voter_from_list(record)
        if kind not in {"add", "rem"} or voter.raft_address != address:
            raise ValueError(f"{request!r} is no change of the voters")
        return cls(kind, voter)

    def apply_to(self, voters: Voters) -> Voters:
        """The voters afterwards. Repeating a change changes nothing."""
        rest = {address: voter for address, voter in voters.items() if address != self.voter.raft_address}
        return rest if self.kind == "rem" else rest | {self.voter.raft_address: self.voter}


def voters_after(voters: Voters, changes: Iterable[Change]) -> Voters:
    """The voters after some changes.

    Those may have been counted in already, all or the first few: the last word on each server is the same.
    """
    for change in changes:
        voters = change.apply_to(voters)
    return voters


def voter_to_list(voter: Voter) -> list[str]:
    """For entries of the log and files."""
    return [voter.node_id, voter.registry_address, voter.raft_address]


def voter_from_list(value: Any) -> Voter:
    """Inverse of `voter_to_list`; raises ValueError."""
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{json.dumps(value, default=repr)} is no voter")
    node_id, registry_address, raft_address = value
    return Voter(node_id=node_id, registry_address=registry_address, raft_address=raft_address)


def voter_message(voter: Voter) -> node_pb2.VoterRecord:
    """A voter as a message."""
    return node_pb2.VoterRecord(
        node_id=voter.node_id, registry_address=voter.registry_address, raft_address=voter.raft_address
    )


def voter_of(message: node_pb2.VoterRecord) -> Voter:
    """A voter from a message."""
    return Voter(
        node_id=message.node_id,
        registry_address=message.registry_address,
        raft_address=message.raft_address,
    )


def enough_without(voters: Voters, gone: Voter | None, newcomer: Voter, healthy: Iterable[str]) -> bool:
    """Whether the healthy ones (by raft address) are a majority at every stage of a change.

    First without the one that goes, then with a newcomer that has nothing yet. Beside a voter that was alone the
    newcomer is needed: there it has to be known to be there.
    """
    rest = set(voters) - {newcomer.raft_address} - ({gone.raft_address} if gone else set())
    up = len(rest & set(healthy))
    alone = gone is None and len(rest) == 1
    return 2 * up > len(rest) and (alone or 2 * up > len(rest) + 1)
