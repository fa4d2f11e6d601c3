"""The long-lived half of the registry's gRPC face: signs of life come in, views go out.

Every voter serves it, leader or not. What a sign means is for `health.detector` to say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import registry_pb2

from ..config import Config
from ..errors import FastCheckdError, InvalidRequestError, NoQuorumError, OverBudgetError
from ..health.detector import FailureDetector, Life
from ..health.probe import bounded_timeout_s, to_wire
from ..registry.arbiter import WITHHOLD_S
from ..registry.commands import ADDRESS_BYTES_MAX
from ..registry.leader import Leader
from ..registry.model import DOWN, SCHEMA, State
from ..registry.outward import Stubs
from ..registry.raft.consensus import Consensus
from ..registry.sessions import count_seats
from ..registry.view import Signs, cluster_view
from ..rpc import abort, answers
from .leader_calls import LeaderCalls

Context = grpc.aio.ServicerContext[Any, Any]

#: A heartbeat is answered when there is news, and so many times within a lease in any case: about each second one.
ANSWERS_PER_LEASE = 4
#: A voter that starts may have promised, before it ended, to renew no lease: with a restart's own time that promise
#: is over after so long. A voter alone promises nobody anything.
SETTLE_S = WITHHOLD_S / 2
#: Probes on behalf of a leader at once; beyond it the silence is told without one.
PROBES_MAX = 32
#: A watched view is sent again this often, so that a watcher notices a dead voter.
VIEW_REPEAT_S = 5.0
#: Changes within this time make one view; or within so much for each rank of each job, because a view says something of
#: all of them: however often somebody changes something, views take a voter a tenth of a core.
VIEW_MERGE_S = 0.02
#: Of what a node says about its processes.
TROUBLE_CHARS_MAX = 300
VIEW_MERGE_RANK_S = 2e-6
#: A cluster has at most `state.NODES_MAX` nodes with an agent and a data process each.
STREAMS_MAX = 10_000
_NO_DATA_PROCESS = {registry_pb2.DATA_HEALTH_GONE, registry_pb2.DATA_HEALTH_STARTING}


class RegistrySigns(LeaderCalls):
    """Heartbeats and views of one voter; a part of `services.registry.RegistryService`."""

    def __init__(
        self, config: Config, raft: Consensus, leader: Leader, stubs: Stubs, detector: FailureDetector
    ) -> None:
        super().__init__(config, raft, leader, stubs)
        self._detector = detector
        self._ram_used_bytes: dict[str, int] = {}
        #: What nodes say of processes that do not run as they should; of those that have such.
        self._troubles: dict[Life, str] = {}
        self._streams = 0
        self._probes = 0
        self._renews_from: float | None = None
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
        return registry_pb2.GetViewResponse(view=self.view(), knows_schema=SCHEMA)

    def view(self) -> registry_pb2.ClusterView:
        """The cluster as applied here, with the signs of life that this voter has heard."""
        leader, now = self._raft.leader, self._now()

        def signs(life: Life) -> Signs:
            heard = self._detector
            reason = self._leader.arbiter.why(life) if leader is not None else self._silence(life, now)
            return Signs(
                heard.heard_ms_ago(life, now), heard.data(life), reason, self._troubles.get(life, "")
            )

        def build(state: State) -> registry_pb2.ClusterView:
            lives = [(node.node_id, node.incarnation) for node in state.nodes.values()]
            known = {life: signs(life) for life in lives}
            suspects = self._leader.arbiter.suspects
            if leader is None:
                suspects = frozenset(life for life in lives if known[life].reason)
            return cluster_view(
                state,
                cluster_id=self._config.cluster_id,
                leader="" if leader is None else leader.node_id,
                voters=self._raft.voters,
                suspects=suspects,
                ram_used_bytes=self._ram_used_bytes,
                signs=known,
            )

        return self._raft.read(build)

    def _silence(self, life: Life, now: float) -> str:
        """Why a node may not be UP, while nobody leads who could judge it: this voter does not hear it either."""
        silent_s = self._detector.silent_s(life, now)
        if silent_s is None or silent_s < self._config.down_after_s:
            return ""
        return "SILENT: no heartbeat, and no leader that could say whether it is DOWN"

    async def WatchView(
        self, request: registry_pb2.WatchViewRequest, context: Context
    ) -> AsyncIterator[registry_pb2.WatchViewResponse]:
        """The view now, after every change, and once in a while."""
        async with self._stream(context):
            while True:
                changed = self._changed
                if self._shared_view is None:
                    self._shared_view = self.view()
                yield registry_pb2.WatchViewResponse(view=self._shared_view)
                try:
                    async with asyncio.timeout(VIEW_REPEAT_S):
                        await changed.wait()
                except TimeoutError:
                    self._shared_view = None
                await asyncio.sleep(max(VIEW_MERGE_S, VIEW_MERGE_RANK_S * self._raft.read(count_seats)))

    async def Heartbeat(
        self, request_iterator: AsyncIterator[registry_pb2.HeartbeatRequest], context: Context
    ) -> AsyncIterator[registry_pb2.HeartbeatResponse]:
        """Note every sign of life; answer with news, or about each second time with a renewed lease.

        A stream that ends is news to the arbiter: a killed process says nothing else.
        """
        life: Life | None = None
        async with self._stream(context):
            try:
                answer = registry_pb2.HeartbeatResponse()
                told: tuple[bool, int, str] | None = None
                answered_at = 0.0
                answer_s = self._config.lease_s / ANSWERS_PER_LEASE
                async for request in request_iterator:
                    now = self._now()
                    life = (request.node.node_id, request.node.incarnation)
                    over, epoch, leader = self._heard(life, request, now)
                    fenced = over and self._leader.ready
                    if fenced and not (told and told[0]):
                        fenced = await self._sure_that_fenced(life)
                    if (fenced, epoch, leader) == told and now - answered_at < answer_s:
                        continue
                    told, answered_at = (fenced, epoch, leader), now
                    answer.fenced, answer.epoch, answer.leader = fenced, epoch, leader
                    answer.lease_seq = 0 if over or not self._renews(life, now) else request.seq
                    yield answer
            finally:
                if life is not None:
                    self._detector.broke(life, self._now())
                    self._leader.arbiter.wake()

    async def _sure_that_fenced(self, life: Life) -> bool:
        """A leader that was deposed without noticing may know less than the node: prove it first."""
        try:
            await self._leader.confirm()
        except NoQuorumError:
            return False
        return self._raft.read(lambda state: _is_over(state, life)) and self._leader.ready

    def _heard(self, life: Life, request: registry_pb2.HeartbeatRequest, now: float) -> tuple[bool, int, str]:
        """Note a heartbeat; returns whether the life is over as far as this voter knows, the epoch, the leader.

        A follower's state may lag: only the leader's word ends a life.
        """
        over, epoch = self._raft.read(lambda state: (_is_over(state, life), state.epoch))
        if not over:
            self._detector.heard(life, now, request.data)
            self._ram_used_bytes[life[0]] = request.ram_used_bytes
            if request.data in _NO_DATA_PROCESS:
                self._leader.data_process_gone(life)
            if request.trouble:
                self._troubles[life] = request.trouble[:TROUBLE_CHARS_MAX]
            else:
                self._troubles.pop(life, None)
        leader = self._raft.leader
        return over, epoch, "" if leader is None else leader.node_id

    def _renews(self, life: Life, now: float) -> bool:
        if self._renews_from is None:
            # The first heartbeat comes with the service's first moments: then is when this voter began.
            self._renews_from = now + SETTLE_S if len(self._raft.voters) > 1 else now
        return now >= self._renews_from and self._detector.renews(life, now)

    @answers
    async def Corroborate(
        self, request: registry_pb2.CorroborateRequest, context: Context
    ) -> registry_pb2.CorroborateResponse:
        """What this voter heard of a node, and what it finds there now; see `FailureDetector.testify`."""
        life = (request.node.node_id, request.node.incarnation)
        if len(request.agent_address) > ADDRESS_BYTES_MAX:
            raise InvalidRequestError("agent_address is not an address")
        finding = None
        if self._probes < PROBES_MAX:
            self._probes += 1
            try:
                timeout_s = bounded_timeout_s(request.probe_timeout_s)
                finding = await self._leader.outward.probe(request.agent_address, life, timeout_s)
            finally:
                self._probes -= 1
        # After the probe, so that it is as long as it has become; nothing may come between it and the promise.
        silence_s = self._detector.testify(
            life,
            self._now(),
            silence_s=request.silence_s,
            withhold_s=min(request.withhold_s, WITHHOLD_S) if request.withhold_s > 0 else 0.0,
        )
        return registry_pb2.CorroborateResponse(silence_s=silence_s, finding=to_wire(finding))

    def forget_except(self, node_ids: set[str]) -> None:
        """Drop what heartbeats told about nodes that are not in the cluster any more."""
        self._ram_used_bytes = {n: used for n, used in self._ram_used_bytes.items() if n in node_ids}
        self._troubles = {life: said for life, said in self._troubles.items() if life[0] in node_ids}

    @contextlib.asynccontextmanager
    async def _stream(self, context: Context) -> AsyncIterator[None]:
        """Counts a long-lived stream and turns our errors into statuses."""
        if self._streams >= STREAMS_MAX:
            await abort(context, OverBudgetError(f"this voter serves {STREAMS_MAX} streams already"))
        self._streams += 1
        try:
            yield
        except FastCheckdError as error:
            await abort(context, error)
        finally:
            self._streams -= 1

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _is_over(state: State, life: Life) -> bool:
    node = state.nodes.get(life[0])
    return node is None or node.incarnation != life[1] or node.state == DOWN
