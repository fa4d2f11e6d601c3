"""Which step answers a load: the registry's answer, or, if that may be done without, what the nodes hold complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import InvalidRequestError, NoQuorumError, StepGoneError, WorldSizeError
from ..registry.client import RegistryClient
from .shared_states import is_in_parts
from .without_quorum import LOOKUP_TIMEOUT_S as PROVISIONAL_LOOKUP_TIMEOUT_S
from .without_quorum import PeerSurvey

LOOKUP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Candidate:
    """A step that answers a load, this rank's part of it."""

    record: rpb.StepRecord
    #: Steps to name if it cannot be had.
    kept: list[int]
    #: Whom to ask, if the registry cannot say.
    nodes: Mapping[str, rpb.NodeRecord] | None = None

    @property
    def provisional(self) -> bool:
        """Found without the registry."""
        return self.nodes is not None

    def offer(self) -> str:
        """What else could be loaded, as a sentence for who cannot have this one."""
        older = [s for s in self.kept if s < self.record.step]
        if not older:
            return "No older step is kept in memory: fall back to durable storage"
        return f"Older steps: {', '.join(map(str, older))}; load one with load(state, step={older[-1]})"


class StepLookup:
    """Asks the registry, and all nodes if need be."""

    def __init__(self, registry: RegistryClient, survey: PeerSurvey) -> None:
        self._registry = registry
        self._survey = survey

    async def find(self, request: tpb.LoadRequest) -> list[Candidate]:
        """The steps to try, the best first: the registry's answer, or all that the nodes hold complete.

        Raises:
            StepGoneError, WorldSizeError, NoQuorumError: see `RestoreCoordinator.bring`.
        """
        try:
            found = await self._lookup(request)
        except NoQuorumError as error:
            if not request.allow_provisional:
                raise NoQuorumError(
                    f"{error}. Without it, the newest step that the nodes hold complete can be loaded, committed or "
                    "not: load(state, allow_provisional=True)"
                ) from None
        else:
            return [] if found is None else [Candidate(*found)]
        steps = await self._survey.candidates(request)
        nodes = self._survey.nodes()
        numbers = [step.step for step in reversed(steps)]
        return [Candidate(s.rank_record(request.job, request.rank), numbers, nodes) for s in steps]

    async def find_all_ranks(self, job: str, step: int | None) -> tuple[rpb.StepRecord, list[int]] | None:
        """A committed step with all its ranks, the newest if none is asked for, and the steps that are kept.

        Raises:
            StepGoneError, NoQuorumError: see `RestoreCoordinator.bring`.
        """
        return await self._committed(rpb.LookupRequest(job=job, step=step), LOOKUP_TIMEOUT_S)

    async def _committed(
        self, lookup: rpb.LookupRequest, timeout_s: float
    ) -> tuple[rpb.StepRecord, list[int]] | None:
        response = await self._registry.lookup(lookup, timeout_s=timeout_s)
        kept = list(response.kept_steps)
        if response.HasField("record"):
            return response.record, kept
        if lookup.HasField("step"):
            has = f"it has {', '.join(map(str, kept))}" if kept else "it has none: is that the job's name?"
            raise StepGoneError(f"job {lookup.job!r} has no committed step {lookup.step} (any more); {has}")
        return None

    async def _lookup(self, request: tpb.LoadRequest) -> tuple[rpb.StepRecord, list[int]] | None:
        timeout_s = PROVISIONAL_LOOKUP_TIMEOUT_S if request.allow_provisional else LOOKUP_TIMEOUT_S
        step = request.step if request.HasField("step") else None
        lookup = rpb.LookupRequest(job=request.job, rank=request.rank, step=step)
        found = await self._committed(lookup, timeout_s)
        if found is None:
            return None
        record, kept = found
        if is_in_parts(record):
            return record, kept  # by any number of ranks
        if record.world_size != request.world_size:
            raise WorldSizeError(
                f"step {record.step} of job {request.job!r} was saved by {record.world_size} ranks and cannot be "
                f"loaded by {request.world_size}: start as many ranks as saved it"
            )
        if len(record.ranks) != 1 or record.ranks[0].rank != request.rank:
            raise InvalidRequestError(f"step {record.step} of job {request.job!r} has no rank {request.rank}")
        return record, kept
