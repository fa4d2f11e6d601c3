"""Every other process' way to the registry: finds the leader, survives its change, keeps a view.

All calls may be repeated (that is their contract), so a call whose answer was lost is simply made again,
at another voter, until its time is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from fastcheck_proto.conventions import ERROR_METADATA_KEY, LEADER_METADATA_KEY
from fastcheck_proto.v1 import common_pb2, registry_pb2, registry_pb2_grpc

from ..config import Config
from ..counters import Counters
from ..errors import FastCheckdError, NoQuorumError
from ..rpc import CHANNEL_OPTIONS, from_rpc_error

logger = logging.getLogger(__name__)

R = TypeVar("R")

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 0.5
#: A voter that takes a call and says nothing is given up for the next one.
ATTEMPT_S = 2.0
#: A voter that has no leader is watched no longer than this: it may be cut off.
LEADERLESS_S = 2.0
#: A living voter repeats its view more often than this.
SILENCE_S = 15.0

_LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
_NO_QUORUM = common_pb2.ErrorCode.Name(common_pb2.ERROR_CODE_NO_QUORUM)


class RegistryClient:
    """A connection to all voters.

    Every call takes the request and `timeout_s`, and raises NoQuorumError when no leader has answered by
    then, or the error that the registry answered with.

    Args:
        stubs: the calls of the voter at an address; by default over gRPC.
    """

    def __init__(self, config: Config, counters: Counters, stubs: Callable[[str], Any] | None = None) -> None:
        self._counters = counters
        self._stubs = stubs or self._grpc_stub
        self._by_node = {voter.node_id: voter.registry_address for voter in config.effective_voters}
        self._addresses = list(self._by_node.values())
        self._leader = self._addresses[0]
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def register(
        self, request: registry_pb2.RegisterRequest, timeout_s: float
    ) -> registry_pb2.RegisterResponse:
        """Start a new life."""
        return await self._call("Register", registry_pb2.RegisterResponse, request, timeout_s)

    async def leave(self, request: registry_pb2.LeaveRequest, timeout_s: float) -> registry_pb2.LeaveResponse:
        """Leave in good order."""
        return await self._call("Leave", registry_pb2.LeaveResponse, request, timeout_s)

    async def open_rank(
        self, request: registry_pb2.OpenRankRequest, timeout_s: float
    ) -> registry_pb2.OpenRankResponse:
        """Take a rank's place."""
        return await self._call("OpenRank", registry_pb2.OpenRankResponse, request, timeout_s)

    async def place(self, request: registry_pb2.PlaceRequest, timeout_s: float) -> registry_pb2.PlaceResponse:
        """Ask for holders."""
        return await self._call("Place", registry_pb2.PlaceResponse, request, timeout_s)

    async def report(
        self, request: registry_pb2.ReportRequest, timeout_s: float
    ) -> registry_pb2.ReportResponse:
        """Report a rank as replicated; WAITING comes after `request.wait_s`, or before `timeout_s` is up."""
        patient = registry_pb2.ReportRequest()
        patient.CopyFrom(request)
        patient.wait_s = max(0.0, min(request.wait_s, timeout_s - BACKOFF_S_MAX))
        return await self._call(
            "Report", registry_pb2.ReportResponse, patient, timeout_s, attempt_s=patient.wait_s + ATTEMPT_S
        )

    async def lookup(
        self, request: registry_pb2.LookupRequest, timeout_s: float
    ) -> registry_pb2.LookupResponse:
        """The newest or the asked-for committed step."""
        return await self._call("Lookup", registry_pb2.LookupResponse, request, timeout_s)

    async def list_job_steps(
        self, request: registry_pb2.ListJobStepsRequest, timeout_s: float
    ) -> registry_pb2.ListJobStepsResponse:
        """A job's steps, committed or under way."""
        return await self._call("ListJobSteps", registry_pb2.ListJobStepsResponse, request, timeout_s)

    async def list_jobs(
        self, request: registry_pb2.ListJobsRequest, timeout_s: float
    ) -> registry_pb2.ListJobsResponse:
        """All jobs."""
        return await self._call("ListJobs", registry_pb2.ListJobsResponse, request, timeout_s)

    async def view(self, timeout_s: float) -> registry_pb2.ClusterView:
        """The cluster as the leader sees it or, without a leader, as any voter does (see `has_leader`)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        request = registry_pb2.GetViewRequest()
        view = (await self._call("GetView", registry_pb2.GetViewResponse, request, timeout_s)).view
        leader = self._by_node.get(view.leader)
        if leader is None or leader == self._leader:
            return view
        self._leader = leader
        try:
            return (
                await self._call("GetView", registry_pb2.GetViewResponse, request, deadline - loop.time())
            ).view
        except NoQuorumError:
            return view

    async def _call(
        self, method: str, _kind: type[R], request: Any, timeout_s: float, *, attempt_s: float | None = None
    ) -> R:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        address = self._leader
        backoff_s = BACKOFF_S_MIN
        problem = "there was no time to ask"
        if attempt_s is None:
            # Short of time, a hung voter must leave some for the others.
            attempt_s = min(ATTEMPT_S, max(0.4, timeout_s / 3))
        while (left_s := deadline - loop.time()) > 0:
            call = getattr(self._stubs(address), method)
            try:
                response: R = await call(request, timeout=min(left_s, attempt_s))
            except grpc.aio.AioRpcError as error:
                trailing = dict(error.trailing_metadata() or ())
                reason = trailing.get(ERROR_METADATA_KEY)
                if reason != _NO_QUORUM and (reason is not None or error.code() not in _LOST):
                    raise _from(error, address) from None
                problem = f"{address}: {error.details() or error.code().name}"
                self._counters.add("registry_retries")
                hint = str(trailing.get(LEADER_METADATA_KEY, ""))
                if hint in self._addresses and hint != address:
                    # Straight on, but not for ever: two voters may each believe the other one leads.
                    address = hint
                    await asyncio.sleep(backoff_s / 4)
                else:
                    address = self._after(address)
                    await asyncio.sleep(min(backoff_s, max(0.0, deadline - loop.time())))
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
            else:
                self._leader = address
                return response
        raise NoQuorumError(
            f"the registry did not answer {method} within {timeout_s:g} s (last: {problem}); "
            "see 'fastcheck status' and whether a majority of the voters runs"
        )

    async def watch(self) -> AsyncIterator[registry_pb2.ClusterView]:
        """The view now and after every change, for ever.

        Never goes back: a voter that lags behind is not listened to until it has caught up. Within one
        version a view may follow that differs in what is not replicated (leader, SUSPECT).
        """
        last: registry_pb2.ClusterView | None = None
        address = self._leader
        backoff_s = BACKOFF_S_MIN
        while True:
            call = self._stubs(address).WatchView(registry_pb2.WatchViewRequest())
            fresh = True
            try:
                silence_s = SILENCE_S
                while True:
                    async with asyncio.timeout(silence_s):
                        answer = await call.read()
                    if not isinstance(answer, registry_pb2.WatchViewResponse):
                        break
                    backoff_s = BACKOFF_S_MIN
                    view = answer.view
                    silence_s = SILENCE_S if view.has_leader else LEADERLESS_S
                    changed = not fresh and last is not None and _volatile(view) != _volatile(last)
                    fresh = False
                    if (
                        last is None
                        or view.version > last.version
                        or (view.version == last.version and changed)
                    ):
                        last = view
                        yield view
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                logger.debug("watching voter %s interrupted: %r", address, error)
            finally:
                call.cancel()
            address = self._after(address)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _grpc_stub(self, address: str) -> registry_pb2_grpc.RegistryServiceStub:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return registry_pb2_grpc.RegistryServiceStub(self._channels[address])

    def _after(self, address: str) -> str:
        return self._addresses[(self._addresses.index(address) + 1) % len(self._addresses)]


def _from(error: grpc.aio.AioRpcError, address: str) -> FastCheckdError:
    return from_rpc_error(error, f"the registry at {address}")


def _volatile(view: registry_pb2.ClusterView) -> tuple[object, ...]:
    """What of a view can change without a new version."""
    return view.leader, view.has_leader, tuple(node.state for node in view.nodes)
