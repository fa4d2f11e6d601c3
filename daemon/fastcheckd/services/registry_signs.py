"""The long-lived half of the registry's gRPC face: signs of life come in, views go out.

Every voter serves it, leader or not. What a sign means is for `health.detector` to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import registry_pb2

from ..config import Config
from ..errors import FastCheckdError, NoQuorumError, OverBudgetError
from ..health.detector import FailureDetector
from ..registry.engine import Engine
from ..registry.leading import Leader
from ..registry.records import Json
from ..registry.view import cluster_view
from ..rpc import abort, answers

Context = grpc.aio.ServicerContext[Any, Any]

#: A heartbeat is answered when there is news, and this often in any case: the sender knows that we live.
HEARTBEAT_ANSWER_S = 1.0
#: A watched view is sent again this often, so that a watcher notices a dead voter.
VIEW_REPEAT_S = 5.0
#: Changes within this time make one view.
VIEW_MERGE_S = 0.02
#: A cluster has at most `state.NODES_MAX` nodes with an agent and a data process each.
STREAMS_MAX = 10_000


class RegistrySigns:
    """Heartbeats and views of one voter; a part of `services.registry.RegistryService`."""

    def __init__(self, config: Config, raft: Engine, leader: Leader, detector: FailureDetector) -> None:
        self._config = config
        self._raft = raft
        self._leader = leader
        self._detector = detector
        self._ram_used_bytes: dict[str, int] = {}
        self._streams = 0
        self._changed = asyncio.Event()
        self._shared_view: registry_pb2.ClusterView | None = None

    def changed(self) -> None:
        """The view has changed: wake the watchers."""
        self._shared_view = None
        self._changed.set()
        self._changed = asyncio.Event()

    @answers
    async def GetView(
        self, request: registry_pb2.GetViewRequest, context: Context
    ) -> registry_pb2.GetViewResponse:
        """The cluster, as applied here."""
        return registry_pb2.GetViewResponse(view=self._view())

    def _view(self) -> registry_pb2.ClusterView:
        leader = self._raft.leader
        return self._raft.read(
            lambda state: cluster_view(
                state,
                cluster_id=self._config.cluster_id,
                leader="" if leader is None else leader.node_id,
                voters=self._raft.voters,
                suspects=self._leader.suspects,
                ram_used_bytes=self._ram_used_bytes,
                signs={},
            )
        )

    async def WatchView(
        self, request: registry_pb2.WatchViewRequest, context: Context
    ) -> AsyncIterator[registry_pb2.WatchViewResponse]:
        """The view now, after every change, and once in a while."""
        async with self._stream(context):
            while True:
                changed = self._changed
                if self._shared_view is None:
                    self._shared_view = self._view()
                yield registry_pb2.WatchViewResponse(view=self._shared_view)
                try:
                    async with asyncio.timeout(VIEW_REPEAT_S):
                        await changed.wait()
                except TimeoutError:
                    self._shared_view = None
                await asyncio.sleep(VIEW_MERGE_S)

    async def Heartbeat(
        self, request_iterator: AsyncIterator[registry_pb2.HeartbeatRequest], context: Context
    ) -> AsyncIterator[registry_pb2.HeartbeatResponse]:
        """Note every sign of life; answer with news, or once in a while."""
        async with self._stream(context):
            answered: tuple[bool, int, str] | None = None
            answered_at = 0.0
            async for request in request_iterator:
                news = self._heard(request)
                if news[0] and not (answered and answered[0]):
                    news = await self._sure_that_fenced(request)
                now = self._now()
                if news != answered or now - answered_at >= HEARTBEAT_ANSWER_S:
                    answered, answered_at = news, now
                    yield registry_pb2.HeartbeatResponse(fenced=news[0], epoch=news[1], leader=news[2])

    async def _sure_that_fenced(self, request: registry_pb2.HeartbeatRequest) -> tuple[bool, int, str]:
        """A leader that was deposed without noticing may know less than the node: prove it first."""
        try:
            await self._leader.confirm()
        except NoQuorumError:
            return (False, *self._heard(request)[1:])
        return self._heard(request)

    def _heard(self, request: registry_pb2.HeartbeatRequest) -> tuple[bool, int, str]:
        """Note a heartbeat; returns (fenced, epoch, leader)."""
        life = (request.node.node_id, request.node.incarnation)

        def look(state: Json) -> tuple[bool, int]:
            node = state["nodes"].get(life[0])
            over = node is None or node["incarnation"] != life[1] or node["state"] == "DOWN"
            return over, state["epoch"]

        over, epoch = self._raft.read(look)
        if not over:
            self._detector.heard(life, self._now(), data_ready=request.data == registry_pb2.DATA_HEALTH_OK)
            self._ram_used_bytes[life[0]] = request.ram_used_bytes
        leader = self._raft.leader
        # A follower's state may lag: only the leader's word ends a life.
        return over and self._leader.ready, epoch, "" if leader is None else leader.node_id

    def forget_except(self, node_ids: set[str]) -> None:
        """Drop what heartbeats told about nodes that are not in the cluster any more."""
        self._ram_used_bytes = {n: used for n, used in self._ram_used_bytes.items() if n in node_ids}

    def _stream(self, context: Context) -> _StreamSlot:
        return _StreamSlot(self, context)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class _StreamSlot:
    """Counts a long-lived stream and turns our errors into statuses."""

    def __init__(self, service: RegistrySigns, context: Context) -> None:
        self._service = service
        self._context = context

    async def __aenter__(self) -> None:
        if self._service._streams >= STREAMS_MAX:
            await abort(self._context, OverBudgetError(f"this voter serves {STREAMS_MAX} streams already"))
        self._service._streams += 1

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._service._streams -= 1
        if isinstance(error, FastCheckdError):
            await abort(self._context, error)
