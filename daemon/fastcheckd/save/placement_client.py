"""Where a save's shards go: the registry says so or, while it is silent, this node by what it knew last.

Every call to the registry for a placement is made here, so that one unanswered call speaks for those of other saves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config
from ..errors import FastCheckdError, IncarnationOverError, NoQuorumError, PeerError, PlacementError
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..view import ViewFollower
from .holders import Quarantine
from .save import Save
from .without_quorum import LastPlacements, Silence, as_placed, place_alone

#: Pause before asking a registry again that could not place or had no leader.
RETRY_PAUSE_S = 0.3
RETRY_PAUSE_MAX_S = 2.0
REGISTRY_TIMEOUT_S = 3.0


def begun_after(known: int, placed: rpb.PlaceResponse, under_way_s: float) -> int:
    """What a save that is under way for so long can say of the sessions that were open when it was begun. Pure.

    The newest one that loads was, if it has been open for longer. Who says so said it before now, and both lengths of
    time are of one clock each.
    """
    if placed.newest_load and placed.newest_load_age_s >= under_way_s:
        return max(known, placed.newest_load + 1)
    return known


@dataclass(frozen=True)
class Placed:
    """Where the shards of a save go."""

    response: rpb.PlaceResponse
    #: This node said so, not the registry.
    alone: bool = False


class PlacementClient:
    """Places the saves of one data process."""

    def __init__(
        self,
        config: Config,
        identity: NodeLife,
        registry: RegistryClient,
        view: ViewFollower,
        quarantine: Quarantine,
    ) -> None:
        self._config = config
        self._identity = identity
        self._registry = registry
        self._view = view
        self._quarantine = quarantine
        self._placements = LastPlacements()
        #: Whoever asks the registry for something else says here whether it answered.
        self.silence = Silence()

    def remember(self, save: Save, placed: Placed, held_by: Mapping[int, Iterable[pb.Holder]]) -> None:
        """Where the copies of a save went in the end: the next one goes there if nobody says otherwise."""
        self._placements.remember(save.key.job, save.key.rank, as_placed(placed.response, held_by))

    async def place(self, save: Save) -> Placed:
        """Ask where the shards go; if the registry is silent, say so oneself.

        Raises:
            PlacementError, PeerError: nobody could say, and the save's patience is at its end.
            FastCheckdError: the registry refuses the save.
        """
        timeout_s = min(REGISTRY_TIMEOUT_S, self._config.provisional_after_s)
        placed = None
        if self.silence.lasts:
            with contextlib.suppress(PlacementError):  # then perhaps somebody answers by now
                placed = self._place_alone(save)
        while placed is None:
            try:
                placed = Placed(await self._ask_for_place(save, timeout_s))
                self._placements.remember(save.key.job, save.key.rank, placed.response)
            except NoQuorumError as silent:
                try:
                    placed = self._place_alone(save)
                except PlacementError as error:
                    await self.wait_out(save, PlacementError(f"{error}; {silent}"))
            except (PlacementError, PeerError) as error:
                await self.wait_out(save, error)
        save.generation = max(save.generation, placed.response.generation)
        if not placed.alone:
            save.begun_after = begun_after(
                save.begun_after, placed.response, time.monotonic() - save.begun_at
            )
        return placed

    async def _ask_for_place(self, save: Save, timeout_s: float) -> rpb.PlaceResponse:
        """The registry's placement; raises what it answers, NoQuorumError when it does not."""
        while True:
            try:
                await self._identity.until_known(timeout_s)
                owner = self._identity.ref()
                response = await self._registry.place(
                    rpb.PlaceRequest(
                        job=save.key.job,
                        step=save.key.step,
                        rank=save.key.rank,
                        world_size=save.world_size,
                        session=save.session,
                        owner=owner,
                        state_bytes=save.state_bytes,
                        chunk_bytes=self._config.chunk_bytes,
                        avoid=self._quarantine.members(save.key.job),
                        oldest_step=save.oldest_step(),
                    ),
                    timeout_s=timeout_s,
                )
            except NoQuorumError:
                self.silence.noted()
                raise
            except IncarnationOverError:
                if not await self._identity.outlives(owner):
                    raise
                continue
            self.silence.heard()
            if not response.shards or any(not s.holders for s in response.shards):
                raise FastCheckdError(
                    f"{save.key}: the registry's placement names no holders; report this defect"
                )
            return response

    def _place_alone(self, save: Save) -> Placed:
        view = self._view.members()
        response = place_alone(
            previous=self._placements.get(save.key.job, save.key.rank),
            nodes=view.nodes,
            is_gone=self._view.is_gone,
            owner=self._config.node_id,
            job=save.key.job,
            rank=save.key.rank,
            state_bytes=save.state_bytes,
            chunk_bytes=self._config.chunk_bytes,
            tolerate=self._config.tolerate,
            spread=self._config.spread,
            failure_domain=self._config.failure_domain,
            avoid=self._quarantine.members(save.key.job),
        )
        response.epoch = max(response.epoch, view.epoch)
        return Placed(response, alone=True)

    async def until_heard(self, save: Save) -> None:
        """Ask for the registry until it answers, however long that takes, and it is this step's turn.

        A report may count although its answer is lost, and then the step must never be dropped. So it is not made
        before somebody is there to answer it.
        """
        pause_s = RETRY_PAUSE_S
        while True:
            heard = True
            try:
                await self._ask_for_place(save, REGISTRY_TIMEOUT_S)
            except (NoQuorumError, PeerError) as error:
                heard = False
                save.stalled(error)
                pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)
            except PlacementError:
                self.silence.heard()  # that is an answer, and this step has its holders
            # Nothing may come between this and the report: others count it from then on.
            if heard and save.may_report():
                return
            await asyncio.sleep(pause_s)

    async def wait_out(self, save: Save, error: FastCheckdError) -> None:
        """Pause before trying again; raises `error` when a save that is not provisional has waited long enough."""
        save.stalled(error)
        if save.idle_s() > self._config.commit_timeout_s and not save.provisional:
            raise error
        await asyncio.sleep(RETRY_PAUSE_S)
