"""Steps given up after the registry may have heard of them: it alone can say that they will never be committed.

Until it does, their bytes must stay, here and at their holders. While a rank's node is away the others make such steps
without end, so the oldest are ruled out as newer ones come, and all of them when memory is short.
"""

from __future__ import annotations

import asyncio
import logging

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..errors import FastCheckdError, NoQuorumError, StoreError
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..store.replica_store import ReplicaStore
from ..store.retention import Kept
from ..view import ViewFollower
from .rank_state import RankState
from .without_quorum import Silence

logger = logging.getLogger(__name__)

#: A trainer may be waiting for the memory.
SUPERSEDE_TIMEOUT_S = 2.0


class GivenUp:
    """Frees the memory of one data process' given-up steps. Owned by the event loop's thread."""

    def __init__(
        self,
        *,
        identity: NodeLife,
        store: ReplicaStore,
        registry: RegistryClient,
        view: ViewFollower,
        silence: Silence,
    ) -> None:
        self._identity = identity
        self._store = store
        self._registry = registry
        self._view = view
        self._silence = silence

    def rule_out_beside(self, saves: RankState, *, keep: int) -> None:
        """The same as `rule_out`, in a task of its own, unless one is at it."""
        if (saves.ruling_out is None or saves.ruling_out.done()) and saves.below_step(keep):
            saves.ruling_out = asyncio.create_task(
                self.rule_out(saves, keep=keep), name=f"rule-out-{saves.job}-{saves.rank}"
            )

    async def rule_out_for_room(self, saves: RankState) -> bool:
        """All of a rank whose trainer waits for memory. A registry that does not answer is not waited for."""
        if self._silence.lasts:
            return False
        return await self.rule_out(saves, keep=0)

    async def rule_out(self, saves: RankState, *, keep: int) -> bool:
        """Have the registry rule out a rank's given-up steps, but for the newest `keep`, and drop them here.

        Their holders follow the registry's view. Returns whether anything was dropped; without a registry nothing is.
        """
        below_step = saves.below_step(keep)
        if not below_step:
            return False
        session = saves.session
        try:
            await self._identity.until_known(SUPERSEDE_TIMEOUT_S)
            answer = await self._registry.supersede(
                rpb.SupersedeRequest(
                    job=saves.job,
                    rank=saves.rank,
                    session=session,
                    owner=self._identity.ref(),
                    below_step=below_step,
                ),
                timeout_s=SUPERSEDE_TIMEOUT_S,
            )
        except FastCheckdError as error:
            if isinstance(error, NoQuorumError):
                self._silence.noted()
            logger.info(
                "steps of rank %d of job %r below %d keep their memory for now: %s",
                saves.rank, saves.job, below_step, error,
            )  # fmt: skip
            return False
        self._silence.heard()
        saves.settled(below_step)
        ruled_out = Kept(steps=frozenset(answer.kept_steps), superseded=((below_step, session + 1),))
        return await asyncio.to_thread(self._drop, saves.job, saves.rank, ruled_out)

    async def drop_of_earlier_sessions(self, saves: RankState) -> bool:
        """Drop what earlier processes of a rank left here uncommitted; whether there was anything.

        As far as a view tells of it that is not older than the session of the present one.
        """
        known = self._view.retention().get(saves.job)
        if known is None or not self._view.speaks_of(saves.job, saves.session):
            return False
        ruled_out = Kept(steps=known.steps, void_below_session=saves.session)
        return await asyncio.to_thread(self._drop, saves.job, saves.rank, ruled_out)

    def _drop(self, job: str, rank: int, kept: Kept) -> bool:
        """Drop the rank's own replicas that are ruled out, the oldest first."""
        doomed = [
            held
            for held in self._store.held(job)
            if held.kind == pb.REPLICA_KIND_OWNER
            and held.key.rank == rank
            and held.key.step not in kept.steps
            and kept.rules_out(held.key.step, held.manifest.session)
        ]
        dropped = False
        for held in sorted(doomed, key=lambda h: h.key.step):
            try:
                self._store.drop(held)
                dropped = True
            except StoreError as error:
                logger.info("step %d of job %r stays for now: %s", held.key.step, job, error)
        return dropped
