"""A barrier for loads: all ranks load the same step, or none of them loads any.

Where torch.distributed joins the ranks of the job, a load is for all of them. They exchange messages through the store
of its default process group, not through collectives: a missing rank is waited for with a limit and then named, and no
process group is left broken. Each rank reports to rank 0, which decides and answers all. This happens twice: to agree
on the step, and, once every rank has all bytes and has checked them, to let all fill their states.

torchrun may keep a store over restarts, with the messages of the ranks before. So rank 0 gives each load a name of its
own, and a rank believes an answer only if it lists the rank's own process as heard. Loads are not counted: a rank that
fails before it comes here, or tries more often than the others, would be off by one for good.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .errors import InvalidArgumentError, LoadFailedError

#: A rank reports at most this many steps, the newest.
STEPS_REPORTED_MAX = 62
#: The first rank's answer comes this much later than it stops waiting itself.
_ANSWER_S = 15.0
#: Between two polls for rank 0's call and answer.
_POLL_S, _POLL_MAX_S = 0.01, 0.5
_WHY_MAX = 300
_RANKS_SHOWN_MAX = 16


@dataclass(frozen=True)
class RankReport:
    """The steps that a rank could load, and whether they were found without the registry; or its error."""

    steps: Sequence[int] = ()
    provisional: bool = False
    why: str = ""
    #: Identifies the reporting process.
    process: str = ""


@dataclass(frozen=True)
class Agreement:
    """What all ranks do: load `step`, or nothing, or raise `why`. `heard`: the processes that reported."""

    step: int | None = None
    why: str = ""
    heard: Sequence[str] = field(default=(), compare=False)


def decide(reports: Mapping[int, RankReport], world_size: int, waited_s: float) -> Agreement:
    """Decide from the ranks' reports; a rank without one did not report in time. Pure."""
    failed = {rank: each.why for rank, each in sorted(reports.items()) if each.why}
    silent = [rank for rank in range(world_size) if rank not in reports]
    if failed:
        rank, why = next(iter(failed.items()))
        who = f"rank {rank} cannot" if len(failed) == 1 else f"ranks {_some(list(failed))} cannot"
        more = f"; ranks {_some(silent)} did not take part" if silent else ""
        return Agreement(why=f"{who} load (rank {rank}: {why}){more}: no rank has loaded anything")
    if silent:
        return Agreement(
            why=f"{'rank' if len(silent) == 1 else 'ranks'} {_some(silent)} did not take part in this load within "
            f"{waited_s:g} s: no rank has loaded anything. All ranks have to call load, or each with together=False"
        )
    common = set.intersection(*(set(each.steps) for each in reports.values()))
    if common:
        return Agreement(max(common))
    provisional = any(each.provisional for each in reports.values())
    if not provisional and not any(each.steps for each in reports.values()):
        return Agreement()
    seen = "; ".join(f"rank {rank} {_some(reports[rank].steps)}" for rank in sorted(reports)[:4])
    if provisional:
        return Agreement(
            why=f"the registry does not answer, and no step is complete for all ranks ({seen}): bring back nodes that "
            "held more, or a majority of the voters"
        )
    return Agreement(why=f"the ranks do not ask for, or cannot load, the same step ({seen})")


class LoadBarrier:
    """One load of all ranks, as one rank sees it. A context manager: an error inside is reported to the others."""

    def __init__(
        self, store: Any, name: str, rank: int, world_size: int, *, ranks_s: float, load_s: float
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._ranks_s = ranks_s
        self._load_s = load_s
        self._process = uuid.uuid4().hex[:16]
        #: Rank 0's name for this load, once known.
        self._call = ""
        #: The round that still waits for this rank's report.
        self._pending: Callable[[RankReport], Agreement] | None = self._agree_on_step

    def step(self, loadable: Callable[[], tuple[list[int], bool]]) -> int | None:
        """The newest step that all ranks can load; None when there is none.

        Raises:
            LoadFailedError: no step is there for all, another rank failed, or did not come.
            Whatever `loadable` raised.
        """
        steps, provisional = loadable()
        found = self._settle(
            self._agree_on_step, RankReport(sorted(steps)[-STEPS_REPORTED_MAX:], provisional)
        )
        if found.step is not None:
            self._pending = self._agree_to_fill
        return found.step

    def fill(self) -> None:
        """Returns when every rank has the step and has checked it; raises LoadFailedError when one has not."""
        self._settle(self._agree_to_fill, RankReport([0]))

    def __enter__(self) -> LoadBarrier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._pending is not None:
            # If the report cannot be sent, the others stop waiting by themselves.
            with contextlib.suppress(RuntimeError):
                self._pending(RankReport(why=_short(error)))

    def _settle(self, agree: Callable[[RankReport], Agreement], report: RankReport) -> Agreement:
        self._pending = None
        try:
            agreement = agree(report)
        except RuntimeError as error:
            raise LoadFailedError(
                f"the ranks cannot reach each other through torch.distributed's store: {_short(error)}"
            ) from error
        if agreement.why:
            raise LoadFailedError(agreement.why)
        return agreement

    def _agree_on_step(self, report: RankReport) -> Agreement:
        report = replace(report, process=self._process)
        if self._rank == 0:
            self._call = self._process
            self._store.set(f"{self._name}/call", self._call)
            return self._decide("step", report, self._ranks_s)
        until = time.monotonic() + self._ranks_s + _ANSWER_S
        poll_s = _POLL_S
        while time.monotonic() < until:
            if self._store.check([f"{self._name}/call"]):
                call = self._store.get(f"{self._name}/call").decode()
                if call != self._call:
                    self._call = call
                    self._put(f"step/{self._rank}", report)
                answer = self._seen("step/agreement")
                if answer is not None and self._process in answer["heard"]:
                    return Agreement(**answer)
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _POLL_MAX_S)
        return Agreement(
            why=f"rank 0 did not hear this rank within {self._ranks_s:g} s: no rank has loaded anything"
        )

    def _agree_to_fill(self, report: RankReport) -> Agreement:
        if self._rank == 0:
            # If it failed itself, no other report matters.
            return self._decide("filling", report, 0.0 if report.why else self._load_s)
        self._put(f"filling/{self._rank}", report)
        if report.why:
            return Agreement(why=report.why)
        answer = self._get("filling/agreement", self._load_s + _ANSWER_S)
        if answer is None:
            return Agreement(why=f"rank 0 did not load within {self._load_s:g} s")
        return Agreement(**answer)

    def _decide(self, topic: str, mine: RankReport, wait_s: float) -> Agreement:
        reports = {0: mine}
        until = time.monotonic() + wait_s
        for rank in range(1, self._world_size) if wait_s else ():
            answer = self._get(f"{topic}/{rank}", until - time.monotonic())
            if answer is not None:
                reports[rank] = RankReport(**answer)
        asked = self._world_size if wait_s else 1
        agreement = replace(decide(reports, asked, wait_s), heard=[each.process for each in reports.values()])
        self._put(f"{topic}/agreement", agreement)
        return agreement

    def _put(self, key: str, value: RankReport | Agreement) -> None:
        self._store.set(f"{self._name}/{self._call}/{key}", json.dumps(asdict(value)))

    def _seen(self, key: str) -> Any:
        full = f"{self._name}/{self._call}/{key}"
        return json.loads(self._store.get(full)) if self._store.check([full]) else None

    def _get(self, key: str, wait_s: float) -> Any:
        """The value of a key; None if it is not there in time."""
        with contextlib.suppress(RuntimeError):  # if the store is gone, looking raises
            self._store.wait([f"{self._name}/{self._call}/{key}"], timedelta(seconds=max(0.01, wait_s)))
        return self._seen(key)


def join_load(job: str, rank: int, world_size: int, *, ranks_s: float, load_s: float) -> LoadBarrier | None:
    """A barrier for a load of all ranks; None where torch.distributed does not join exactly these ranks.

    Args:
        ranks_s: Longest wait for the other ranks before the step is known.
        load_s: Longest wait while they fetch it.
    """
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_world_size() != world_size:
        return None
    store = dist.distributed_c10d._get_default_store()
    # A wait holds the lock of a connection that other code of this process uses too.
    store = store.clone() if hasattr(store, "clone") else store
    return LoadBarrier(store, f"fastcheck/{job}", rank, world_size, ranks_s=ranks_s, load_s=load_s)


def step_alone(found: tuple[list[int], bool], world_size: int) -> int | None:
    """The step for a rank without a barrier; raises InvalidArgumentError if the ranks would have to agree on it."""
    steps, provisional = found
    if not provisional:
        return max(steps, default=None)
    raise InvalidArgumentError(
        f"the registry does not answer, and the {world_size} ranks cannot agree on a step: initialise "
        "torch.distributed first, or pass the same step= on every rank. Complete steps, as this rank sees it: "
        f"{_some(sorted(steps))}"
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_WHY_MAX]


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[-_RANKS_SHOWN_MAX:]))
    return (f"... {shown}" if len(numbers) > _RANKS_SHOWN_MAX else shown) or "none"
