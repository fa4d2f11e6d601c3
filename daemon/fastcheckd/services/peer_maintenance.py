"""The part of PeerService that operators ask: check what is here."""

from __future__ import annotations

from typing import Any

import grpc.aio

from fastcheck_proto.conventions import STEP_MAX
from fastcheck_proto.v1 import peer_pb2

from ..errors import InvalidRequestError, PeerError
from ..maintenance.maintenance import Maintenance
from ..rpc import answers

Context = grpc.aio.ServicerContext[Any, Any]


class PeerMaintenance:
    """A part of `services.peer.PeerService`."""

    #: None only where nothing keeps the store in order: a holder in a test.
    _maintenance: Maintenance | None

    def _room(self) -> Maintenance:
        if self._maintenance is None:
            raise PeerError("this node checks no replicas: ask another one")
        return self._maintenance

    @answers
    async def VerifyReplicas(
        self, request: peer_pb2.VerifyReplicasRequest, context: Context
    ) -> peer_pb2.VerifyReplicasResponse:
        """Check replicas now; bad ones are dropped."""
        if request.HasField("step") and request.step > STEP_MAX:
            raise InvalidRequestError(f"step {request.step} is more than {STEP_MAX}")
        return await self._room().verify(request.job, request.step if request.HasField("step") else None)
