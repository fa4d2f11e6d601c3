"""Every other process' way to the registry: finds the leader, survives its change, keeps a view.

All calls may be repeated (that is their contract), so a call whose answer was lost is simply made again,
at another voter, until its time is up. Every voter will do, since followers forward to the leader; one that views name
as the leader is asked directly.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from fastcheck_proto.conventions import ERROR_METADATA_KEY
from fastcheck_proto.v1 import common_pb2, node_pb2, registry_pb2

from ..config import Config
from ..counters import Counters
from ..dialer import Dialer
from ..errors import FastCheckdError, FencedError, NoQuorumError, UnsafeError
from ..rpc import from_rpc_error
from .outward import GrpcStubs, Stubs
from .raft.membership import voter_message

logger = logging.getLogger(__name__)

Q_contra = TypeVar("Q_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 0.25
#: A voter that takes a call and says nothing is given up for the next one.
ATTEMPT_S = 2.0
#: The first attempt to take a rank's place asks whose it is; another one may come between.
OPEN_TRIES = 5
#: A voter that has no leader is watched no longer than this: it may be cut off.
LEADERLESS_S = 2.0
#: A change of the voters waits so long for a leader that can make it: longer than an election takes.
LEADER_PATIENCE_S = 3.0
#: A living voter repeats its view more often than this.
SILENCE_S = 15.0

_LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
_NO_QUORUM = common_pb2.ErrorCode.Name(common_pb2.ERROR_CODE_NO_QUORUM)


class _Bound(Protocol[Q_contra, R_co]):
    async def __call__(self, request: Q_contra, timeout_s: float) -> R_co:
        """Ask the registry."""


class _Call(Generic[Q_contra, R_co]):
    """A method of a `RegistryClient` that makes the call of its name, and nothing else."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._method = "".join(word.capitalize() for word in name.split("_"))

    def __get__(self, client: RegistryClient, owner: type) -> _Bound[Q_contra, R_co]:
        async def call(request: Q_contra, timeout_s: float) -> R_co:
            answer: Any = await client._call(self._method, object, request, timeout_s)
            return answer  # type: ignore[no-any-return]  # a stub has no types

        return call


class RegistryClient:
    """A connection to all voters.

    Every call takes the request and `timeout_s`, and raises NoQuorumError when no leader has answered by
    then, or the error that the registry answered with.

    Args:
        config: names the first voters.
        stubs: how voters are reached; by default over gRPC. Whoever gives one closes it.
        dialer: makes that way's channels; by default with the config's certificate.
    """

    def __init__(
        self,
        config: Config,
        counters: Counters,
        stubs: Stubs | None = None,
        *,
        dialer: Dialer | None = None,
    ) -> None:
        self._counters = counters
        self._by_node = {voter.node_id: voter.registry_address for voter in config.effective_voters}
        self._addresses = list(self._by_node.values())
        #: Whom to ask next: the voter that answered last, or a new leader.
        self._asked = self._addresses[0]
        #: The leader that was last heard of. It is gone to once: where it cannot be reached, others forward.
        self._followed = ""
        #: Which voter an address is, or was: a call under way may still go on with an earlier one's.
        self._node_at = {address: node_id for node_id, address in self._by_node.items()}
        self._channels: GrpcStubs | None = None
        if stubs is None:
            stubs = self._channels = GrpcStubs(dialer or Dialer.of(config), self._node_at.__getitem__)
        self._stubs: Stubs = stubs
        self._voters = list(map(voter_message, config.effective_voters))

    def use_voters(self, voters: Iterable[node_pb2.VoterRecord]) -> None:
        """Go by these voters from now on, such as a view names them; none are no change.

        Calls under way that wait for another voter go on with these when that one has failed.
        """
        known = list(voters)
        by_node = {voter.node_id: voter.registry_address for voter in known}
        if not by_node or by_node == self._by_node:
            return
        logger.info("the registry's voters are now %s", ", ".join(f"{n} at {a}" for n, a in by_node.items()))
        self._by_node, self._voters = by_node, known
        self._addresses = list(by_node.values())
        self._node_at.update({address: node_id for node_id, address in by_node.items()})
        if self._asked not in self._addresses:
            self._asked = self._addresses[0]

    #: Start a new life.
    register = _Call[registry_pb2.RegisterRequest, registry_pb2.RegisterResponse]()
    #: Leave in good order.
    leave = _Call[registry_pb2.LeaveRequest, registry_pb2.LeaveResponse]()
    #: The process of a session is done; UnsafeError while some voter may not know this call.
    close_rank = _Call[registry_pb2.CloseRankRequest, registry_pb2.CloseRankResponse]()
    #: Rule out steps that are not committed; UnsafeError while some voter may not know this call.
    supersede = _Call[registry_pb2.SupersedeRequest, registry_pb2.SupersedeResponse]()
    #: Keep committed steps no more; UnsafeError if the job runs, or some voter may not know this call.
    delete_steps = _Call[registry_pb2.DeleteStepsRequest, registry_pb2.DeleteStepsResponse]()
    #: Ask for holders.
    place = _Call[registry_pb2.PlaceRequest, registry_pb2.PlaceResponse]()
    #: The newest or the asked-for committed step.
    lookup = _Call[registry_pb2.LookupRequest, registry_pb2.LookupResponse]()
    #: A job's steps, committed or under way.
    list_job_steps = _Call[registry_pb2.ListJobStepsRequest, registry_pb2.ListJobStepsResponse]()
    #: All jobs.
    list_jobs = _Call[registry_pb2.ListJobsRequest, registry_pb2.ListJobsResponse]()
    #: Begin or end a drain.
    set_draining = _Call[registry_pb2.SetDrainingRequest, registry_pb2.SetDrainingResponse]()
    #: Take a DOWN node off the list; UnsafeError if it is not DOWN.
    forget = _Call[registry_pb2.ForgetRequest, registry_pb2.ForgetResponse]()
    #: Changes of nodes' states, the newest last.
    history = _Call[registry_pb2.HistoryRequest, registry_pb2.HistoryResponse]()
    #: What stopping a node for good would cost.
    safe_to_stop = _Call[registry_pb2.SafeToStopRequest, registry_pb2.SafeToStopResponse]()
    #: How redundant the committed steps are, and what is being done about it.
    get_redundancy = _Call[registry_pb2.GetRedundancyRequest, registry_pb2.GetRedundancyResponse]()
    #: Say which committed replicas are held here.
    report_inventory = _Call[registry_pb2.ReportInventoryRequest, registry_pb2.ReportInventoryResponse]()

    @property
    def voters(self) -> list[node_pb2.VoterRecord]:
        """The voters that are known here."""
        return list(self._voters)

    async def open_rank(
        self, request: registry_pb2.OpenRankRequest, timeout_s: float
    ) -> registry_pb2.OpenRankResponse:
        """Take a rank's place.

        Raises:
            FencedError: others take it in turn with us, or the client wants it `again` and another process has had
                it since.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        asked = registry_pb2.OpenRankRequest()
        asked.CopyFrom(request)
        for _ in range(OPEN_TRIES):
            left_s = deadline - loop.time()
            answer = await self._call("OpenRank", registry_pb2.OpenRankResponse, asked, left_s)
            if answer.session:
                return answer
            if request.again and not answer.vacant:
                raise FencedError(
                    f"another process has taken the place of rank {request.rank} of job {request.job}; this one's "
                    "saves are refused"
                )
            # Whoever asks again lives: what it says to replace is what it was just told of.
            asked.replaces = answer.current
        raise FencedError(
            f"other processes keep taking the place of rank {request.rank} of job {request.job}: "
            "see that each rank is started once"
        )

    async def current_session(self, request: registry_pb2.OpenRankRequest, timeout_s: float) -> int:
        """The session that holds a rank's place, as the leader has applied it; 0: none does. Nothing is opened."""
        asked = registry_pb2.OpenRankRequest()
        asked.CopyFrom(request)
        asked.ClearField("replaces")
        answer: registry_pb2.OpenRankResponse = await self._call(
            "OpenRank", registry_pb2.OpenRankResponse, asked, timeout_s
        )
        return answer.current

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

    async def replace_voter(
        self, request: registry_pb2.ReplaceVoterRequest, timeout_s: float
    ) -> registry_pb2.ReplaceVoterResponse:
        """Replace a voter that is gone for good. May take as long as `timeout_s`: the new one has to catch up.

        Without a leader for `LEADER_PATIENCE_S` it fails at once: nothing would come of waiting.
        """
        return await self._call(
            "ReplaceVoter",
            registry_pb2.ReplaceVoterResponse,
            request,
            timeout_s,
            attempt_s=timeout_s,
            patience_s=LEADER_PATIENCE_S,
        )

    async def add_voters(
        self, request: registry_pb2.AddVotersRequest, timeout_s: float
    ) -> registry_pb2.AddVotersResponse:
        """Have more nodes vote. As long and as patient as `replace_voter`."""
        return await self._call(
            "AddVoters",
            registry_pb2.AddVotersResponse,
            request,
            timeout_s,
            attempt_s=timeout_s,
            patience_s=LEADER_PATIENCE_S,
        )

    async def views(self, timeout_s: float) -> dict[str, registry_pb2.ClusterView | None]:
        """The view of each voter that is known here, asked directly; None: it does not answer."""

        async def ask(address: str) -> registry_pb2.ClusterView | None:
            try:
                request = registry_pb2.GetViewRequest()
                answer = await self._stubs(address).GetView(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                logger.debug("the voter at %s does not answer: %s", address, error.code().name)
                return None
            assert isinstance(answer, registry_pb2.GetViewResponse)
            return answer.view

        voters = dict(self._by_node)
        return dict(zip(voters, await asyncio.gather(*map(ask, voters.values())), strict=True))

    async def view(self, timeout_s: float) -> registry_pb2.ClusterView:
        """The cluster as the leader sees it or, without a leader, as any voter does (see `has_leader`)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        request = registry_pb2.GetViewRequest()
        view = (await self._call("GetView", registry_pb2.GetViewResponse, request, timeout_s)).view
        asked = self._asked
        self._follow(view)
        if self._asked == asked:
            return view
        try:
            return (
                await self._call("GetView", registry_pb2.GetViewResponse, request, deadline - loop.time())
            ).view
        except NoQuorumError:
            return view

    def _follow(self, view: registry_pb2.ClusterView) -> None:
        """Ask the leader itself from now on, if a view names another one than before."""
        leader = self._by_node.get(view.leader)
        if leader is not None and leader != self._followed:
            self._followed = self._asked = leader

    async def _call(
        self,
        method: str,
        _kind: type[T],
        request: Any,
        timeout_s: float,
        *,
        attempt_s: float | None = None,
        patience_s: float = math.inf,
    ) -> T:
        """Ask voter after voter until one answers.

        Args:
            timeout_s: for all attempts; `attempt_s` for each.
            patience_s: gives up when attempts have failed for so long.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + timeout_s
        address = self._asked
        backoff_s = BACKOFF_S_MIN
        failing_since: float | None = None
        problem = "there was no time to ask"
        if attempt_s is None:
            # Short of time, a hung voter must leave some for the others.
            attempt_s = min(ATTEMPT_S, max(0.4, timeout_s / 3))
        while (left_s := deadline - loop.time()) > 0:
            call = getattr(self._stubs(address), method)
            try:
                response: T = await call(request, timeout=min(left_s, attempt_s))
            except grpc.aio.AioRpcError as error:
                # As pairs: grpcio 1.63 takes a mapping's way into dict() and fails there.
                trailing = dict(tuple(error.trailing_metadata() or ()))
                reason = trailing.get(ERROR_METADATA_KEY)
                if reason != _NO_QUORUM and (reason is not None or error.code() not in _LOST):
                    raise _from(error, address) from None
                problem = f"{address}: {error.details() or error.code().name}"
                self._counters.add("registry_retries")
                failing_since = failing_since or loop.time()
                if loop.time() - failing_since > patience_s:
                    break
                address = self._after(address)
                await asyncio.sleep(min(backoff_s, max(0.0, deadline - loop.time())))
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
            else:
                if address in self._addresses:
                    self._asked = address
                return response
        raise NoQuorumError(
            f"the registry did not answer {method} within {loop.time() - began:.3g} s (last: {problem}); "
            "see 'fastcheck status' and whether a majority of the voters runs"
        )

    async def watch(self) -> AsyncIterator[registry_pb2.ClusterView]:
        """The view now and after every change, for ever.

        Never goes back: a voter that lags behind is not listened to until it has caught up. Within one
        version a view may follow that differs in what is not replicated (leader, SUSPECT).
        """
        last: registry_pb2.ClusterView | None = None
        address = self._asked
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
                    self._follow(view)
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
            except asyncio.CancelledError:
                # We are, or else the stream was: its channel is closed some time after there is a new certificate.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                logger.debug("watching voter %s anew, under the new certificate", address)
            finally:
                call.cancel()
            address = self._after(address)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def close(self) -> None:
        """Close all connections."""
        if self._channels is not None:
            await self._channels.close()

    def _after(self, address: str) -> str:
        if address not in self._addresses:  # the voters have changed meanwhile
            return self._addresses[0]
        return self._addresses[(self._addresses.index(address) + 1) % len(self._addresses)]


def _from(error: grpc.aio.AioRpcError, address: str) -> FastCheckdError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UnsafeError(f"the voter at {address} runs a version that does not know this call: upgrade it")
    return from_rpc_error(error, f"the registry at {address}")


def _volatile(view: registry_pb2.ClusterView) -> tuple[object, ...]:
    """What of a view can change without a new version."""
    return view.leader, view.has_leader, tuple(node.state for node in view.nodes)
