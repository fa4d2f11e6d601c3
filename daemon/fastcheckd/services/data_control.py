"""DataControlService, the agent's line to its data process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import node_pb2 as npb
from fastcheck_proto.v1 import node_pb2_grpc as npb_grpc

from ..health.lease import LeaseHolder
from ..identity import NodeLife
from ..rpc import answers
from ..store.replica_store import ReplicaStore
from ..view import ViewFollower

Context = grpc.aio.ServicerContext[Any, Any]


class DataControlService(npb_grpc.DataControlServiceServicer):
    """Takes the node's incarnation and its lease from the agent; answers with signs of progress."""

    def __init__(
        self,
        identity: NodeLife,
        lease: LeaseHolder,
        store: ReplicaStore,
        view: ViewFollower,
        on_assume: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._lease = lease
        self._store = store
        self._view = view
        self._on_assume = on_assume
        self._answers = 0

    @answers
    async def Assume(self, request: npb.AssumeRequest, context: Context) -> npb.AssumeResponse:
        """Be this incarnation from now on."""
        if self._identity.assume(request.incarnation):
            self._on_assume()
        self._answers += 1
        usage = self._store.usage()
        return npb.AssumeResponse(
            progress=self._answers,
            ram_used_bytes=usage.used_bytes - usage.free_bytes,  # free ones go when needed
            ram_budget_bytes=usage.budget_bytes,
            not_up=self._view.why_not_up(self._identity.ref()),
        )

    @answers
    async def Hold(
        self, request_iterator: AsyncIterator[npb.HoldRequest], context: Context
    ) -> npb.HoldResponse:
        """The node's lease, as often as it is renewed."""
        async for request in request_iterator:
            self._lease.renew(
                request.incarnation, request.deadline_monotonic_ns, has_quorum=request.has_quorum
            )
        return npb.HoldResponse()
