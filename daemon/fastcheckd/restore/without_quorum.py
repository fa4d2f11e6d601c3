"""Finding a step without the registry: every node of the last view is asked what it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import FastCheckdError, NoQuorumError, StepGoneError
from ..transfer.client import PeerClient
from ..view import ViewFollower
from .survey import FoundStep, complete_steps

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0
#: Nodes asked at once.
ASKED_AT_ONCE = 64
#: How long a load that may be provisional waits for the registry first.
LOOKUP_TIMEOUT_S = 5.0


class PeerSurvey:
    """Asks all nodes about a job."""

    def __init__(self, peers: PeerClient, view: ViewFollower) -> None:
        self._peers = peers
        self._view = view

    def nodes(self) -> dict[str, rpb.NodeRecord]:
        """Everyone that the last view names, by node id. Who was DOWN then may be back."""
        return {node.node_id: node for node in self._view.members().nodes}

    async def steps(self, job: str, world_size: int = 0) -> list[FoundStep]:
        """Steps that the nodes hold complete, the newest first; of that world size only, unless it is 0.

        Raises:
            NoQuorumError: this process knows no nodes, or none of them answers.
        """
        nodes = self.nodes()
        if not nodes:
            raise NoQuorumError(
                "the registry does not answer, and this node has never seen a view of the cluster: bring back a "
                "majority of the voters, or load on a node that was part of the cluster before"
            )
        answers = await self._ask(nodes.values(), job)
        if not answers:
            raise NoQuorumError(
                f"the registry does not answer, and none of the {len(nodes)} nodes of the last view does either: "
                "look at the network of this node"
            )
        found = complete_steps(job, answers)
        return [step for step in found if world_size in {0, step.world_size} or step.replicated]

    async def candidates(self, request: tpb.LoadRequest) -> list[FoundStep]:
        """The steps that answer a load, the best first; empty when none was asked for by number and none is there.

        Raises:
            StepGoneError: the asked-for step is not complete; the message lists what is.
            NoQuorumError: see `steps`.
        """
        found = await self.steps(request.job, request.world_size)
        if not request.HasField("step"):
            return found
        wanted = [step for step in found if step.step == request.step]
        if not wanted:
            complete = ", ".join(str(step.step) for step in found) or "none"
            raise StepGoneError(
                f"step {request.step} of job {request.job!r}, saved by {request.world_size} ranks, is not complete on "
                f"the nodes that answer (the registry does not); complete are: {complete}"
            )
        return wanted

    async def _ask(self, nodes: Iterable[rpb.NodeRecord], job: str) -> Mapping[str, list[peer_pb2.Replica]]:
        slots = asyncio.Semaphore(ASKED_AT_ONCE)
        answers: dict[str, list[peer_pb2.Replica]] = {}

        async def ask(node: rpb.NodeRecord) -> None:
            try:
                async with slots:
                    answers[node.node_id] = await self._peers.list_replicas(
                        node.node_id, node.data_address, job, None, ASK_TIMEOUT_S
                    )
            except FastCheckdError as error:
                logger.info("node %s does not say what it holds: %s", node.node_id, error)

        await asyncio.gather(*(ask(node) for node in nodes))
        return answers
