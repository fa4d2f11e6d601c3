"""Who is in the cluster and in which state; what became of each, remembered for people. Pure.

A node that is not DOWN is DRAINING exactly if its `draining` is set. Of a DOWN node `draining` is what its
next life begins with: a drain outlasts crashes and restarts, until the node leaves in good order or it is undone.
"""

from __future__ import annotations

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from .model import (
    DOWN,
    DRAINING,
    UNKNOWN,
    UP,
    MalformedError,
    NodeState,
    Ref,
    State,
    done,
    refusal,
    state_name,
)

NODES_MAX = 4096
#: Transitions that are remembered.
HISTORY_MAX = 512
#: The reason of a DOWN that a node asked for itself. Then a drain of it is over.
LEFT = "left"
FORGOTTEN = "forgotten"
_BEGINNINGS = {UNKNOWN: "registered", DOWN: "came back"}


def register(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """A node's new life; the same life_id again is the same life, unless that life is over."""
    said, nodes = command.register, state.nodes
    known = nodes.get(said.node_id)
    if known is not None and known.life_id == said.life_id and known.state != DOWN:
        return _with_epoch(state, known.incarnation)
    if known is None and len(nodes) >= NODES_MAX:
        down = [(node.incarnation, other) for other, node in nodes.items() if node.state == DOWN]
        if not down:
            raise MalformedError(f"the cluster has {NODES_MAX} nodes already, none of them DOWN")
        _remove(state, min(down)[1], f"forgotten to make room for {said.node_id}", command.at_ms)
    incarnation = state.next_incarnation
    state.next_incarnation += 1
    draining = known is not None and known.draining
    before = UNKNOWN if known is None else known.state
    nodes[said.node_id] = rpb.NodeRecord(
        node_id=said.node_id,
        incarnation=incarnation,
        state=DRAINING if draining else UP,
        agent_address=said.agent_address,
        data_address=said.data_address,
        lane_address=said.lane_address,
        voter=said.voter,
        ram_budget_bytes=said.ram_budget_bytes,
        labels=said.labels,
        since_ms=command.at_ms,
        life_id=said.life_id,
        draining=draining,
    )
    reason = _BEGINNINGS.get(before, "started anew")
    _changed(state, said.node_id, before, reason + (", still draining" if draining else ""), command.at_ms)
    return _with_epoch(state, incarnation)


def set_state(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """UP, DRAINING or DOWN, if the node is still in the incarnation that the judgement was about."""
    change = command.set_state
    node_id, incarnation = Ref.of(change.node)
    node = state.nodes.get(node_id)
    if node is None or node.incarnation != incarnation:
        return refusal(pb.ERROR_CODE_FENCED, f"node {node_id} is not in incarnation {incarnation} any more")
    if node.state != change.state and node.state == DOWN:
        return refusal(pb.ERROR_CODE_FENCED, f"node {node_id} is DOWN: only registering again brings it back")
    if change.state != DOWN:
        node.draining = change.state == DRAINING
    elif change.reason == LEFT:
        node.draining = False
    _move(state, node, change.state, change.reason, command.at_ms)
    return _with_epoch(state)


def set_draining(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """A node gets nothing new and its copies are made elsewhere, in this life and those after; or not any more."""
    node = state.nodes.get(command.set_draining.node_id)
    if node is None:
        return _not_known(command.set_draining.node_id)
    node.draining = command.set_draining.draining
    if node.state != DOWN:
        wanted, reason = (DRAINING, "drained") if node.draining else (UP, "drain undone")
        _move(state, node, wanted, reason, command.at_ms)
    return _with_epoch(state)


def forget(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """Takes a DOWN node off the list. One that is gone by this very command already is no mistake."""
    node_id = command.forget.node_id
    node = state.nodes.get(node_id)
    if node is None:
        last = next((entry for entry in reversed(state.history) if entry.node.node_id == node_id), None)
        return _not_known(node_id) if last is None or last.to != UNKNOWN else _with_epoch(state)
    if node.state != DOWN:
        return refusal(
            pb.ERROR_CODE_UNSAFE,
            f"node {node_id} is {state_name(node.state)}: only a node that is DOWN can be forgotten; stop its "
            "daemon first",
        )
    _remove(state, node_id, FORGOTTEN, command.at_ms)
    return _with_epoch(state)


def set_voters(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """Names the voters that everyone goes by from now on; the engine has changed them already."""
    voters = list(command.set_voters.voters)
    if state.voters != voters:
        state.voters = voters
        state.version += 1
    return done()


def _with_epoch(state: State, incarnation: int = 0) -> log_pb2.RegistryResult:
    return log_pb2.RegistryResult(ok=True, incarnation=incarnation, epoch=state.epoch)


def _not_known(node_id: str) -> log_pb2.RegistryResult:
    return refusal(pb.ERROR_CODE_NOT_FOUND, f"the registry knows no node {node_id}; see 'fastcheck nodes'")


def _move(state: State, node: rpb.NodeRecord, wanted: NodeState, reason: str, when: int) -> None:
    before = node.state
    if before != wanted:
        node.state, node.since_ms = wanted, when
        _changed(state, node.node_id, before, reason, when)


def _changed(state: State, node_id: str, before: NodeState, reason: str, when: int) -> None:
    """Note that a node is in another state or life than before."""
    node = state.nodes[node_id]
    node.reason = reason
    _remember(state, node, before, node.state, reason, when)


def _remove(state: State, node_id: str, reason: str, when: int) -> None:
    node = state.nodes.pop(node_id)
    _remember(state, node, node.state, UNKNOWN, reason, when)


def _remember(
    state: State, node: rpb.NodeRecord, before: NodeState, after: NodeState, reason: str, when: int
) -> None:
    """The membership has changed: a new epoch, and a line of history."""
    state.epoch += 1
    state.version += 1
    line = rpb.Transition(epoch=state.epoch, node=Ref.of(node).message(), to=after, reason=reason, at_ms=when)
    # `from` is a word of Python's: it can only be set by its name.
    setattr(line, "from", before)
    state.history.append(line)
    del state.history[:-HISTORY_MAX]
