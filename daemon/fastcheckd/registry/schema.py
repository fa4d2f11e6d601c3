"""Which schema of the state the voters agree on: a newer one is proposed when each of them has said that it knows it.

A voter of an earlier version refuses commands that it does not know, and would have another state than the others from
then on. So a leader asks all voters first, whichever version they run; one that does not answer may be such a one.
What was agreed on is in the state, and outlasts leaders and voters that are down later.
"""

from __future__ import annotations

import asyncio
import logging

from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from ..errors import FastCheckdError, UnsafeError
from .model import SCHEMA
from .outward import Outward
from .raft.consensus import Consensus

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
#: A voter may be upgraded or come back any time.
RETRY_S = 5.0


def is_agreed(raft: Consensus, schema: int) -> bool:
    """Whether commands of this schema count."""
    return raft.read(lambda state: state.schema) >= schema


async def agree(raft: Consensus, own_node_id: str, outward: Outward, schema: int) -> None:
    """Have the state in this schema, if it is not yet.

    Raises:
        UnsafeError: some voter does not know it, or does not answer.
        NoQuorumError: this voter does not lead.
    """
    if is_agreed(raft, schema):
        return
    others = [voter for voter in raft.voters if voter.node_id != own_node_id]
    known = await asyncio.gather(*(outward.knows_schema(voter, ASK_TIMEOUT_S) for voter in others))
    silent = [voter.node_id for voter, knows in zip(others, known, strict=True) if knows is None]
    older = [
        v.node_id for v, knows in zip(others, known, strict=True) if knows is not None and knows < schema
    ]
    if older:
        raise UnsafeError(
            f"the registry cannot do this before all voters run a version that knows it: upgrade {', '.join(older)}"
        )
    if silent:
        raise UnsafeError(
            "the registry cannot do this before all voters have said once that they know it: no answer from "
            f"{', '.join(silent)}; start it, or replace it with 'fastcheck voters replace'"
        )
    await raft.propose(log_pb2.RegistryCommand(upgrade=schema))
    logger.info("registry: all voters know schema %d of the state", schema)


async def agree_in_time(raft: Consensus, own_node_id: str, outward: Outward, schema: int = SCHEMA) -> None:
    """Try until it is agreed."""
    while True:
        try:
            await agree(raft, own_node_id, outward, schema)
        except FastCheckdError as error:
            logger.info("registry: %s", error)
            await asyncio.sleep(RETRY_S)
        else:
            return
