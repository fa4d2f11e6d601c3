"""What a leader does about the voters: replaces one that is gone for good, adds more, agrees with them on a schema.

New nodes are asked first: if one cannot, nothing has changed. Then the engine changes its membership, one
server at a time, and last the registry names the new voters to everyone. After any failure the same request
goes on from where it stopped.

A voter of an earlier version refuses commands that it does not know, and would have another state than the others from
then on. So a leader asks all voters before it proposes a newer schema of the state, whichever version they run; one
that does not answer may be such a one. What was agreed on is in the state, and outlasts leaders and voters that are
down later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy

from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2

from ..config import Voter, split_address
from ..errors import FastCheckdError, InvalidRequestError, UnsafeError
from . import commands
from .model import DOWN, SCHEMA, UP, state_name
from .outward import Outward
from .raft.consensus import Consensus
from .raft.membership import voter_of

CHANGE_TIMEOUT_S = 20.0
#: Between questions to a new voter, whose process takes a second or two to start.
ANSWER_PAUSE_S = 0.2
#: A voter that does not know a newer schema may be upgraded or come back any time.
ASK_TIMEOUT_S = 1.0
RETRY_S = 5.0


async def replace_voter(
    engine: Consensus,
    cluster_id: str,
    request: registry_pb2.ReplaceVoterRequest,
    *,
    at_ms: int,
    outward: Outward,
) -> list[Voter]:
    """Replace one voter by another; at the leader. Returns all voters afterwards.

    Raises:
        InvalidRequestError: the request does not fit the cluster.
        UnsafeError: the old one lives, or too few others do.
        NoQuorumError: not done in time; the same request goes on from there.
    """
    named = engine.read(lambda state: list(map(voter_of, state.voters)))
    # Until a first replacement the engine's are all there is to say; afterwards those may be between two.
    voters = named or sorted(engine.voters, key=lambda v: v.node_id)
    nodes = engine.read(lambda state: deepcopy(state.nodes))
    old, new = plan(request, voters, nodes)
    after = [new if voter == old else voter for voter in voters]
    if new not in voters:
        if not named:
            # So that nobody takes the voters for fewer while one is gone and the other not there yet.
            await _name(engine, voters, at_ms)
        address = nodes[new.node_id].agent_address
        await outward.become_voter(new.node_id, address, cluster_id, after, _version(engine), voters)
        await engine.replace_member(old, new, timeout_s=CHANGE_TIMEOUT_S)
        await _name(engine, after, at_ms)
    return after


async def add_voters(
    engine: Consensus,
    cluster_id: str,
    request: registry_pb2.AddVotersRequest,
    *,
    at_ms: int,
    outward: Outward,
) -> list[Voter]:
    """Have more nodes vote; at the leader. Returns all voters afterwards.

    Raises:
        InvalidRequestError: the request does not fit the cluster.
        UnsafeError: too few voters are healthy for one more.
        NoQuorumError: not done in time; the same request goes on from there.
    """
    # The log's: what the registry names may be older, after an addition that broke off or a recovery.
    voters = sorted(engine.voters, key=lambda v: v.node_id)
    nodes = engine.read(lambda state: deepcopy(state.nodes))
    added = plan_added(request, voters, nodes)
    after = sorted({*voters, *added}, key=lambda v: v.node_id)
    if len(voters) % 2:
        # So that everyone goes by these until all of the others have been added; between them there is an even number.
        await _name(engine, voters, at_ms)
    if after == voters:
        return voters  # said again after it was done
    for new in added:
        address = nodes[new.node_id].agent_address
        await outward.become_voter(new.node_id, address, cluster_id, after, _version(engine), voters)
    for new in added:
        # Of two voters both are needed: one that cannot be reached would end the quorum.
        await _until_it_answers(new, engine.read(lambda state: state.schema), outward)
        await engine.add_member(new, timeout_s=CHANGE_TIMEOUT_S)
    await _name(engine, after, at_ms)
    return after


def _version(engine: Consensus) -> int:
    return engine.read(lambda state: state.version)


async def _name(engine: Consensus, voters: Sequence[Voter], at_ms: int) -> None:
    """Have the registry name its voters to everyone."""
    result = await engine.propose(commands.set_voters(voters, at_ms=at_ms))
    if not result.ok:
        raise FastCheckdError(f"the registry refused its new voters: {result.message}")


async def _until_it_answers(voter: Voter, schema: int, outward: Outward) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CHANGE_TIMEOUT_S
    while (known := await outward.knows_schema(voter, ASK_TIMEOUT_S)) is None:
        if loop.time() > deadline:
            raise UnsafeError(
                f"the registry process of {voter.node_id} does not answer at {voter.registry_address}: nothing was "
                "changed for it; see the log of that node"
            )
        await asyncio.sleep(ANSWER_PAUSE_S)
    if known < schema:
        raise UnsafeError(
            f"{voter.node_id} runs a version that does not know the registry's state: upgrade it"
        )


def plan_added(
    request: registry_pb2.AddVotersRequest,
    voters: Sequence[Voter],
    nodes: Mapping[str, registry_pb2.NodeRecord],
) -> list[Voter]:
    """The voters that come. Pure.

    Raises:
        InvalidRequestError: they are not nodes that could become voters, or would make an even number of them.
    """
    added = []
    taken = {address for v in voters for address in (v.registry_address, v.raft_address)}
    for asked in request.voters:
        node = nodes.get(asked.node_id)
        if node is None:
            raise InvalidRequestError(f"there is no node {asked.node_id}; see 'fastcheck nodes'")
        known = next((voter for voter in voters if voter.node_id == asked.node_id), None)
        if known is not None:
            added.append(known)
            continue
        if node.state != UP:
            raise InvalidRequestError(f"{asked.node_id} is {state_name(node.state)}; a new voter must be UP")
        host = split_address(node.agent_address)[0]
        new = Voter(
            node_id=asked.node_id,
            registry_address=asked.registry_address or _at(host, voters[0].registry_address),
            raft_address=asked.raft_address or _at(host, voters[0].raft_address),
        )
        own = {new.registry_address, new.raft_address}
        if len(own) < 2 or own & taken:
            raise InvalidRequestError(
                f"{new.registry_address} or {new.raft_address} is taken by another voter; give {asked.node_id} others"
            )
        taken |= own
        added.append(new)
    count = len({voter.node_id for voter in [*voters, *added]})
    if len({voter.node_id for voter in added}) != len(added) or not added:
        raise InvalidRequestError("name each new voter once")
    if count % 2 == 0:
        raise InvalidRequestError(
            f"that would make {count} voters: an even number survives no more losses than one less; add another one"
        )
    return added


def plan(
    request: registry_pb2.ReplaceVoterRequest,
    voters: Sequence[Voter],
    nodes: Mapping[str, registry_pb2.NodeRecord],
) -> tuple[Voter, Voter]:
    """The voter that goes and the one that comes. Pure.

    Raises:
        InvalidRequestError: they are not a voter and a node that could become one.
        UnsafeError: the old one is not known to be gone.
    """
    old_id, new_id = request.old_node_id, request.new_node_id
    old = next((voter for voter in voters if voter.node_id == old_id), None)
    if old is None:
        done = next((voter for voter in voters if voter.node_id == new_id), None)
        if done is not None and request.raft_address in {"", done.raft_address}:
            return done, done  # said again after it was done
        raise InvalidRequestError(
            f"{old_id} is no voter; the voters are {', '.join(voter.node_id for voter in voters)}"
        )
    if new_id not in nodes:
        raise InvalidRequestError(f"there is no node {new_id}; see 'fastcheck nodes'")
    if nodes[new_id].state != UP:
        raise InvalidRequestError(f"{new_id} is {state_name(nodes[new_id].state)}; a new voter must be UP")
    host = split_address(nodes[new_id].agent_address)[0]
    new = Voter(
        node_id=new_id,
        registry_address=request.registry_address or _at(host, old.registry_address),
        raft_address=request.raft_address or _at(host, old.raft_address),
    )
    others = [voter for voter in voters if voter != old]
    taken = {address for v in others for address in (v.registry_address, v.raft_address)}
    if old_id != new_id:
        if any(voter.node_id == new_id for voter in others):
            raise InvalidRequestError(f"{new_id} is a voter already")
        if old_id in nodes and nodes[old_id].state != DOWN:
            raise UnsafeError(
                f"{old_id} is {state_name(nodes[old_id].state)}: only a voter that is DOWN is replaced; stop it first"
            )
    if new.raft_address == old.raft_address:
        raise InvalidRequestError(
            f"the new voter needs another raft address: under {old.raft_address} promises were made that it does not "
            "know of; give one with --raft-address"
        )
    if taken & {new.registry_address, new.raft_address} or new.registry_address == new.raft_address:
        raise InvalidRequestError(
            f"{new.registry_address} or {new.raft_address} is taken by another voter; give others"
        )
    return old, new


def _at(host: str, address: str) -> str:
    port = split_address(address)[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


logger = logging.getLogger(__name__)


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
