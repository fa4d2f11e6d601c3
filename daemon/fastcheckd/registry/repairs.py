"""The leader's repair of lost copies: compares what is wanted with what is left, and has the difference made.

    survey (redundancy) → orders (repair_planner) → an offer to the target → `rehold` commits the change

The state alone is authority. What is kept here (orders under way, failures) is computed again
by the next leader, who finds the same work, and what was fetched already lying there. A node that
says "I have it no more" is believed at once; that it may forget to say so is why each is asked once in a while (audit).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Set

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config
from ..errors import FastCheckdError
from .audit import Auditor
from .commands import CHANGES_MAX, MARKED_MAX
from .model import UP, Ref, ShardId, State
from .outward import Outward
from .raft.consensus import Consensus
from .redundancy import RecordedReplica, Survey, is_lost, survey
from .repair_planner import Absences, Attempts, Order, Planner

logger = logging.getLogger(__name__)

ORDERS_MAX = 32
#: The work is looked at after every change of the state, and this often in any case.
LOOK_INTERVAL_S = 2.0
#: Changes within this time are looked at together.
LOOK_PAUSE_S = 0.05
PROPOSE_RETRY_S = 1.0
#: A fetch is given this much, twice what its bytes take at the full rate, and for each of its chunks as long as a
#: target whose own saves go first may take for it.
FETCH_BASE_S = 30.0
FETCH_CHUNK_S = 2.0
FETCH_S_MAX = 1800.0


class Repairs:
    """The repairs of one leadership after the other. Used on the registry's event loop.

    Args:
        outward: the way to the nodes.
        unwell: node ids that the leader suspects, or has damped.
    """

    def __init__(
        self,
        config: Config,
        engine: Consensus,
        outward: Outward,
        *,
        unwell: Callable[[], Set[str]],
    ) -> None:
        self._config = config
        self._engine = engine
        self._outward = outward
        self._unwell = unwell
        self._planner = Planner(
            tolerate=config.tolerate,
            spread=config.spread,
            domain_key=config.failure_domain,
            orders_max=ORDERS_MAX,
        )
        self._auditor = Auditor(engine, outward, self.mark_lost, self.mark_held)
        self._wake = asyncio.Event()
        #: The newest survey, and the versions of what it was made from.
        self._surveyed: tuple[tuple[int, int], Survey] = ((-1, -1), Survey())
        self._reset()

    def _reset(self) -> None:
        self._planner.attempts = Attempts()
        self._absences = Absences()
        self._under_way: dict[ShardId, Order] = {}
        self._tasks: dict[ShardId, asyncio.Task[None]] = {}
        #: Copies that are there and not committed yet.
        self._done: list[Order] = []
        self._epoch = -1
        self._repaired = 0
        self._failures = 0
        self._last_failure = ""

    # --- what others tell it ---------------------------------------------------------------------

    def changed(self) -> None:
        """The state has changed, or its holders have: those are no part of the view, so the engine does not tell."""
        self._wake.set()

    def returned(self, node: Ref, *, finished: bool) -> None:
        """A node has said what it holds, or the last part of it: nothing more will come back by itself."""
        self._absences.heard(node, self._now(), finished=finished)
        self._wake.set()

    async def mark_lost(self, replicas: Iterable[RecordedReplica]) -> None:
        """Nodes no longer have replicas that records name.

        Raises:
            NoQuorumError: perhaps not noted; it may be repeated.
        """
        news = self._with_state(replicas, lost=False)
        for replica in news[:10]:
            logger.warning(
                "registry: node %s has lost its copy of %s", replica.ref.node_id, tuple(replica.shard)
            )
        await self._mark(news, lambda part: log_pb2.ReplicaMarks(lost=part))

    async def mark_held(self, replicas: Iterable[RecordedReplica]) -> None:
        """Nodes do have replicas, which may have been LOST: they were made again.

        Raises:
            NoQuorumError: perhaps not noted; it may be repeated.
        """
        news = self._with_state(replicas, lost=True)
        await self._mark(news, lambda part: log_pb2.ReplicaMarks(held=part))

    def _with_state(self, replicas: Iterable[RecordedReplica], *, lost: bool) -> list[RecordedReplica]:
        """Those of the replicas that records name, and that are LOST or not."""
        return self._engine.read(lambda state: sorted(r for r in set(replicas) if is_lost(state, r) is lost))

    async def _mark(
        self,
        replicas: list[RecordedReplica],
        marks: Callable[[list[log_pb2.RecordedShard]], log_pb2.ReplicaMarks],
    ) -> None:
        for first in range(0, len(replicas), MARKED_MAX):
            part = [replica.message() for replica in replicas[first : first + MARKED_MAX]]
            await self._engine.propose(log_pb2.RegistryCommand(mark=marks(part)))
            self.changed()

    # --- what it tells ---------------------------------------------------------------------------

    def survey(self) -> Survey:
        """How redundant the committed steps are; computed anew only when something has changed."""

        def look(state: State) -> Survey:
            versions, found = self._surveyed
            if versions != (now := (state.version, state.holders_version)):
                found = survey(state, tolerate=self._config.tolerate, domain_key=self._config.failure_domain)
                self._surveyed = now, found
            return found

        return self._engine.read(look)

    def redundancy(self) -> rpb.GetRedundancyResponse:
        """What is short, and what is being done about it."""
        found = self.survey()
        return rpb.GetRedundancyResponse(
            short_shards=found.short_shards,
            short_bytes=found.short_bytes,
            lost_shards=found.lost_shards,
            repairing=len(self._under_way),
            repaired=self._repaired,
            repair_failures=self._failures,
            last_failure=self._last_failure,
            domains_short_shards=found.domains_short_shards,
            wanted_copies=self._config.tolerate + 1,
        )

    # --- the work --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Repair until cancelled: as long as this voter leads. Returns with nothing under way."""
        auditing = asyncio.create_task(self._auditor.run(), name="audit")
        try:
            while True:
                self._wake.clear()
                if auditing.done():
                    auditing.result()  # raises: it ends by being cancelled
                await self._commit_done()
                began_at = self._now()
                self._begin()
                # With very many shards a look takes a while: leave most of the time to others.
                pause_s = max(LOOK_PAUSE_S, 4 * (self._now() - began_at))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_INTERVAL_S):
                        await self._wake.wait()
                await asyncio.sleep(pause_s)
        finally:
            tasks = [auditing, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # What was known is of this leadership alone.
            self._reset()

    def _begin(self) -> None:
        found = self.survey()
        now = self._now()
        unwell = self._unwell()

        def plan(state: State) -> list[Order]:
            if state.epoch != self._epoch:
                self._epoch = state.epoch
                self._planner.attempts.membership_changed()
            self._call_off(state, {shortage.id for shortage in found.shortages})
            return self._planner.orders(
                state,
                found,
                spared=self._absences.spared(found.dead, state.nodes, now),
                unwell=unwell,
                under_way=self._under_way,
                now=now,
            )

        self._planner.attempts.keep({shortage.id for shortage in found.shortages})
        orders = self._engine.read(plan)
        for order in orders:
            self._under_way[order.shortage.id] = order
            request = self._engine.read(lambda state, order=order: self._request(state, order))  # type: ignore[misc]
            task = asyncio.create_task(self._fetch(order, request), name=f"repair-{order.target.node_id}")
            self._tasks[order.shortage.id] = task

    def _call_off(self, state: State, short: Set[ShardId]) -> None:
        """End orders whose target is over, or that nobody needs any more."""
        for shard_id, order in list(self._under_way.items()):
            node = state.nodes.get(order.target.node_id)
            lives = node is not None and node.incarnation == order.target.incarnation and node.state == UP
            if (not lives or shard_id not in short) and (task := self._tasks.get(shard_id)) is not None:
                task.cancel()

    def _request(self, state: State, order: Order) -> peer_pb2.ReplicateRequest:
        nodes = state.nodes
        return peer_pb2.ReplicateRequest(
            cluster_id=self._config.cluster_id,
            epoch=state.epoch,
            holder_incarnation=order.target.incarnation,
            key=order.shortage.id.message(),
            digest=order.shortage.digest,
            bytes=order.shortage.bytes,
            repair=True,
            sources=[
                pb.Holder(
                    node=ref.message(),
                    data_address=nodes[ref.node_id].data_address,
                    lane_address=nodes[ref.node_id].lane_address,
                )
                for ref in order.sources
            ],
        )

    async def _fetch(self, order: Order, request: peer_pb2.ReplicateRequest) -> None:
        shard_id = order.shortage.id
        try:
            answer = await self._outward.replicate(
                order.target.node_id, order.target_address, request, self._timeout_s(order.shortage.bytes)
            )
            if answer.digest != request.digest:
                raise FastCheckdError(f"node {order.target.node_id} made a copy with another digest")
        except FastCheckdError as error:
            self._failed(order, str(error))
            self._under_way.pop(shard_id, None)
        except asyncio.CancelledError:
            self._under_way.pop(shard_id, None)
            raise
        except Exception as error:
            logger.exception("registry: a repair failed")
            self._failed(order, f"internal error: {error!r}")
            self._under_way.pop(shard_id, None)
        else:
            # Stays under way until it is committed: nobody else need make it.
            self._done.append(order)
        finally:
            self._tasks.pop(shard_id, None)
            self._wake.set()

    def _timeout_s(self, shard_bytes: int) -> float:
        chunks = -(-shard_bytes // self._config.chunk_bytes)
        rate_s = 2 * shard_bytes / self._config.repair_bytes_per_s
        return min(FETCH_S_MAX, FETCH_BASE_S + FETCH_CHUNK_S * chunks + rate_s)

    def _failed(self, order: Order, why: str) -> None:
        self._failures += 1
        self._last_failure = (
            f"a copy of shard {order.shortage.id.shard} of rank {order.shortage.id.rank}, step "
            f"{order.shortage.id.step} of job {order.shortage.id.job} on node {order.target.node_id}: {why}"
        )[:500]
        logger.warning("registry: could not make %s", self._last_failure)
        self._planner.attempts.failed(order.shortage.id, order.target.node_id, self._now())

    async def _commit_done(self) -> None:
        """Propose what was made. What cannot be committed now stays in the list: it lies there."""
        while self._done:
            orders = self._done[:CHANGES_MAX]
            changes = [order.change() for order in orders if not order.refill]
            verdicts: dict[ShardId, str] = {}
            try:
                await self.mark_held(
                    RecordedReplica(order.shortage.id, order.target) for order in orders if order.refill
                )
                if changes:
                    command = log_pb2.RegistryCommand(rehold=log_pb2.HolderChanges(changes=changes))
                    result = await self._engine.propose(command)
                    why = result.why if result.ok else [result.message] * len(changes)
                    proposed = (order.shortage.id for order in orders if not order.refill)
                    verdicts = dict(zip(proposed, why, strict=True))
            except FastCheckdError as error:
                logger.warning("registry: cannot commit %d copies made: %s", len(orders), error)
                await asyncio.sleep(PROPOSE_RETRY_S)
                return
            del self._done[: len(orders)]
            for order in orders:
                self._under_way.pop(order.shortage.id, None)
                if reason := verdicts.get(order.shortage.id):
                    self._failed(order, reason)
                    continue
                self._repaired += 1
                logger.info(
                    "registry: node %s has a copy of %s now", order.target.node_id, tuple(order.shortage.id)
                )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
