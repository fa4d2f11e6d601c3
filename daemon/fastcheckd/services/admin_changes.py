"""The admin calls that change the cluster or have something done: drain, forget, verify, delete, another voter.

The registry decides and refuses; nothing here is more than a door to it. `verify` asks all nodes side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from fastcheck_proto.conventions import check_name
from fastcheck_proto.v1 import admin_pb2, admin_pb2_grpc, registry_pb2

from ..config import Config
from ..errors import FastCheckdError, InvalidRequestError, NoQuorumError
from ..registry.client import RegistryClient
from ..rpc import answers
from ..transfer.client import PeerClient
from . import admin_reports as reports

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

#: Per call, to the registry and to each node; less where the caller waits less.
CALL_TIMEOUT_S = 1.5
#: However little time is left, a node that is well says something within this.
QUESTION_S_MIN = 0.3
#: A node reads all that it holds, and a new voter gets a snapshot. Less where the caller waits less.
WORK_TIMEOUT_S = 600.0
#: For the proof that somebody leads: longer than an election takes.
QUORUM_S = 2.5
#: What is left of the caller's patience for the answer's way back.
REPLY_S = 0.3


class AdminTimeouts:
    """How long the questions may take that an answer is made of, so that the caller is still there for it.

    Silence then costs the caller a part of the answer instead of all of it.

    Args:
        most_s: longest for all of them together.
    """

    def __init__(self, context: Context, most_s: float = WORK_TIMEOUT_S) -> None:
        self._loop = asyncio.get_running_loop()
        left_s = context.time_remaining()
        self._ends = self._loop.time() + (most_s if left_s is None else min(most_s, left_s - REPLY_S))

    def question_s(self, most_s: float = CALL_TIMEOUT_S) -> float:
        """For the next question, or for several that are asked at once."""
        return min(most_s, max(QUESTION_S_MIN, self._ends - self._loop.time()))


class AdminChanges(admin_pb2_grpc.AdminServiceServicer):
    """Half of the admin service; `AdminService` in `admin.py` is whole."""

    def __init__(self, config: Config, registry: RegistryClient, peers: PeerClient) -> None:
        self._config = config
        self._registry = registry
        self._peers = peers

    @answers
    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """A node gets nothing new and its copies are made elsewhere, or that ends."""
        wanted = registry_pb2.SetDrainingRequest(node_id=_node(request.node_id), draining=not request.undo)
        await self._registry.set_draining(wanted, CALL_TIMEOUT_S)
        return admin_pb2.DrainResponse()

    @answers
    async def CheckStop(
        self, request: admin_pb2.CheckStopRequest, context: Context
    ) -> admin_pb2.CheckStopResponse:
        """What stopping a node for good would cost."""
        asked = registry_pb2.SafeToStopRequest(node_id=_node(request.node_id))
        return admin_pb2.CheckStopResponse(verdict=await self._registry.safe_to_stop(asked, CALL_TIMEOUT_S))

    @answers
    async def ForgetNode(
        self, request: admin_pb2.ForgetNodeRequest, context: Context
    ) -> admin_pb2.ForgetNodeResponse:
        """Take a DOWN node off the list."""
        await self._registry.forget(
            registry_pb2.ForgetRequest(node_id=_node(request.node_id)), CALL_TIMEOUT_S
        )
        return admin_pb2.ForgetNodeResponse()

    @answers
    async def NodeHistory(
        self, request: admin_pb2.NodeHistoryRequest, context: Context
    ) -> admin_pb2.NodeHistoryResponse:
        """Changes of nodes' states, the newest last."""
        node_id = _node(request.node_id) if request.node_id else ""
        asked = registry_pb2.HistoryRequest(node_id=node_id, limit=request.limit)
        found = await self._registry.history(asked, CALL_TIMEOUT_S)
        return admin_pb2.NodeHistoryResponse(transitions=found.transitions)

    @answers
    async def ChangeVoter(
        self, request: admin_pb2.ChangeVoterRequest, context: Context
    ) -> admin_pb2.ChangeVoterResponse:
        """Put another node in the place of a voter that is gone for good."""
        _node(request.change.old_node_id)
        _node(request.change.new_node_id)
        patience = AdminTimeouts(context)
        await self._need_quorum(patience)
        changed = await self._registry.replace_voter(request.change, patience.question_s(WORK_TIMEOUT_S))
        return admin_pb2.ChangeVoterResponse(voters=changed.voters)

    @answers
    async def EnlargeVoters(
        self, request: admin_pb2.EnlargeVotersRequest, context: Context
    ) -> admin_pb2.EnlargeVotersResponse:
        """Have more nodes vote."""
        for voter in request.change.voters:
            _node(voter.node_id)
        patience = AdminTimeouts(context)
        await self._need_quorum(patience)
        changed = await self._registry.add_voters(request.change, patience.question_s(WORK_TIMEOUT_S))
        return admin_pb2.EnlargeVotersResponse(voters=changed.voters)

    async def _need_quorum(self, patience: AdminTimeouts) -> None:
        """Only voters that can commit can change who votes; without them the change itself would wait for minutes.

        Raises:
            NoQuorumError: no leader has proved that it leads.
        """
        try:
            await self._registry.history(registry_pb2.HistoryRequest(limit=1), patience.question_s(QUORUM_S))
        except NoQuorumError as error:
            raise NoQuorumError(
                f"nothing was changed: {error}. If a majority is gone for good, see "
                "docs/operating/quorum-lost.md"
            ) from None

    @answers
    async def ListVoters(
        self, request: admin_pb2.ListVotersRequest, context: Context
    ) -> admin_pb2.ListVotersResponse:
        """The voters, each asked for itself: also where none leads, or none answers."""
        views = await self._registry.views(AdminTimeouts(context).question_s())
        return admin_pb2.ListVotersResponse(voters=reports.voter_reports(self._registry.voters, views))

    @answers
    async def Verify(self, request: admin_pb2.VerifyRequest, context: Context) -> admin_pb2.VerifyResponse:
        """Have every node check what it holds of a job, or of one step, now."""
        job = checked_job(request.job)
        step = request.step if request.HasField("step") else None
        patience = AdminTimeouts(context)
        view = await self._registry.view(patience.question_s())
        work_s = patience.question_s(WORK_TIMEOUT_S)
        found = await self._ask(
            view,
            lambda node_id, at: self._peers.verify_replicas(node_id, at, job, step, work_s),
            work_s,
        )
        response = admin_pb2.VerifyResponse(unreachable=reports.unanswered(view, found))
        for node_id, answer in sorted(found.items()):
            response.checked += answer.checked
            response.checked_bytes += answer.checked_bytes
            response.bad.extend(admin_pb2.VerifyFinding(node_id=node_id, key=key) for key in answer.bad)
        return response

    @answers
    async def Delete(self, request: admin_pb2.DeleteRequest, context: Context) -> admin_pb2.DeleteResponse:
        """Keep steps no more; says what the nodes held of them. A dry run says only that."""
        steps = request.steps
        plan = registry_pb2.DeleteStepsRequest()
        plan.CopyFrom(steps)
        plan.dry_run = True
        outcome = await self._registry.delete_steps(plan, CALL_TIMEOUT_S)
        view = await self._registry.view(CALL_TIMEOUT_S)
        held = await self._ask(
            view,
            lambda node_id, at: self._peers.list_replicas(node_id, at, steps.job, None, CALL_TIMEOUT_S),
            CALL_TIMEOUT_S,
        )
        if not steps.dry_run:
            done = await self._registry.delete_steps(steps, CALL_TIMEOUT_S)
            # A call whose answer was lost is repeated, and then finds nothing left to delete.
            deleted = {*outcome.deleted_steps, *done.deleted_steps} - set(done.kept_steps)
            del outcome.deleted_steps[:], outcome.kept_steps[:]
            outcome.deleted_steps.extend(sorted(deleted))
            outcome.kept_steps.extend(done.kept_steps)
            outcome.ends_sessions |= done.ends_sessions
            outcome.refusal = ""
        return admin_pb2.DeleteResponse(
            outcome=outcome,
            nodes=reports.deleted_bytes(outcome, held),
            unreachable=reports.unanswered(view, held) + reports.down(view),
        )

    async def _ask(
        self,
        view: registry_pb2.ClusterView,
        call: Callable[[str, str], Awaitable[T]],
        timeout_s: float,
    ) -> dict[str, T]:
        """Put one question to all nodes that are not DOWN, at once: by `call(node_id, data_address)`.

        Returns:
            Node id → its answer if it gave one.
        """
        addresses = {node.node_id: node.data_address for node in view.nodes}

        async def one(node_id: str) -> tuple[str, T] | None:
            try:
                async with asyncio.timeout(timeout_s):
                    return node_id, await call(node_id, addresses[node_id])
            except (FastCheckdError, TimeoutError) as error:
                logger.info("%s did not answer an admin question: %s", node_id, error or "timed out")
                return None

        replies = await asyncio.gather(*(one(node_id) for node_id in reports.node_ids_to_ask(view)))
        return dict(reply for reply in replies if reply is not None)


def checked_job(name: str) -> str:
    """A job's name, or the caller's mistake."""
    return _checked("job", name)


def _node(name: str) -> str:
    return _checked("node_id", name)


def _checked(what: str, name: str) -> str:
    try:
        return check_name(what, name)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
