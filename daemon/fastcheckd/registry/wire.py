"""Voters as the config has them and as messages."""

from __future__ import annotations

from fastcheck_proto.v1 import node_pb2

from ..config import Voter


def voter_message(voter: Voter) -> node_pb2.VoterRecord:
    """A voter as a message."""
    return node_pb2.VoterRecord(
        node_id=voter.node_id, registry_address=voter.registry_address, raft_address=voter.raft_address
    )


def voter(message: node_pb2.VoterRecord) -> Voter:
    """A voter from a message."""
    return Voter(
        node_id=message.node_id,
        registry_address=message.registry_address,
        raft_address=message.raft_address,
    )
