"""Ranks agree on what they load: one step, and on all of them or on none.

Where torch.distributed joins the ranks of the job, a load is for all of them. They speak through the store of its
default process group, not with collectives: a rank that does not come is waited for with a limit and named, and no
process group is left in pieces. Each rank tells the first one how it fares; that one decides and tells all. Twice: which
step it is, and, once each has all bytes and has checked them, that all may fill their states.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .errors import FastCheckError, InvalidArgumentError, LoadFailedError

#: Newest steps that a rank tells the others of.
STEPS_TOLD_MAX = 62
#: The first rank's answer comes this much later than it stops waiting itself.
_ANSWER_S = 15.0
_WHY_MAX = 300
_RANKS_SHOWN_MAX = 16

#: Loads so far of each process group, by job: names for what is said in the store.
_rounds: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Told:
    """How a rank fares: steps that it could load, whether found without the registry; or why it cannot."""

    steps: Sequence[int] = ()
    provisional: bool = False
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """What all ranks do: load `step`, or nothing, or raise `why`."""

    step: int | None = None
    why: str = ""


def decide(told: Mapping[int, Told], world_size: int, waited_s: float) -> Verdict:
    """What to do about what the ranks told; ranks that are not among them did not speak in time. Pure."""
    failed = {rank: each.why for rank, each in sorted(told.items()) if each.why}
    silent = [rank for rank in range(world_size) if rank not in told]
    if failed:
        rank, why = next(iter(failed.items()))
        who = f"rank {rank} cannot" if len(failed) == 1 else f"ranks {_some(list(failed))} cannot"
        more = f"; ranks {_some(silent)} did not take part" if silent else ""
        return Verdict(why=f"{who} load (rank {rank}: {why}){more}: no rank has loaded anything")
    if silent:
        return Verdict(
            why=f"{'rank' if len(silent) == 1 else 'ranks'} {_some(silent)} did not take part in this load within "
            f"{waited_s:g} s: no rank has loaded anything. All ranks have to call load, or each with together=False"
        )
    common = set.intersection(*(set(each.steps) for each in told.values()))
    if common:
        return Verdict(max(common))
    provisional = any(each.provisional for each in told.values())
    if not provisional and not any(each.steps for each in told.values()):
        return Verdict()
    seen = "; ".join(f"rank {rank} {_some(told[rank].steps)}" for rank in sorted(told)[:4])
    if provisional:
        return Verdict(
            why=f"the registry does not answer, and no step is complete for all ranks ({seen}): bring back nodes that "
            "held more, or a majority of the voters"
        )
    return Verdict(why=f"the ranks do not ask for, or cannot load, the same step ({seen})")


class Meeting:
    """One load of all ranks, as one of them sees it. A context manager: what is raised inside is told to the others."""

    def __init__(
        self, store: Any, name: str, rank: int, world_size: int, *, ranks_s: float, load_s: float
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._ranks_s = ranks_s
        self._load_s = load_s
        #: What is still to be said, so that nobody waits for it in vain.
        self._owes: str | None = None

    def step(self, loadable: Callable[[], tuple[list[int], bool]]) -> int | None:
        """The newest step that all ranks can load; None when there is none.

        Raises:
            LoadFailedError: no step is there for all, another rank failed, or did not come.
            FastCheckError: what `loadable` raised.
        """
        self._owes = "step"
        try:
            steps, provisional = loadable()
        except FastCheckError as error:
            self._exchange("step", Told(why=_short(error)), self._ranks_s)
            raise
        found = self._exchange("step", Told(sorted(steps)[-STEPS_TOLD_MAX:], provisional), self._ranks_s)
        if found.step is not None:
            self._owes = "filling"
        return found.step

    def fill(self) -> None:
        """Returns when every rank has the step and has checked it; raises LoadFailedError when one has not."""
        self._exchange("filling", Told([0]), self._load_s)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._owes is None:
            return
        told = Told(why=_short(error))
        try:
            if self._rank:
                self._put(f"{self._owes}/{self._rank}", told)
            else:
                self._put(f"{self._owes}/verdict", decide({0: told}, 1, 0.0))
        except RuntimeError:
            pass  # the others will not hear it: they stop waiting by themselves

    def _exchange(self, topic: str, told: Told, wait_s: float) -> Verdict:
        self._owes = None
        try:
            if self._rank == 0:
                verdict = decide(self._gather(topic, told, wait_s), self._world_size, wait_s)
                self._put(f"{topic}/verdict", verdict)
            else:
                self._put(f"{topic}/{self._rank}", told)
                if told.why:
                    return Verdict()  # it has its own error to raise
                answer = self._get(f"{topic}/verdict", wait_s + _ANSWER_S)
                verdict = (
                    Verdict(why=f"rank 0 did not take part in this load within {wait_s:g} s")
                    if answer is None
                    else Verdict(**answer)
                )
        except RuntimeError as error:
            raise LoadFailedError(
                f"the ranks cannot speak to each other through torch.distributed's store: {_short(error)}"
            ) from error
        if verdict.why and not told.why:
            raise LoadFailedError(verdict.why)
        return verdict

    def _gather(self, topic: str, mine: Told, wait_s: float) -> dict[int, Told]:
        told = {0: mine}
        until = time.monotonic() + wait_s
        for rank in range(1, self._world_size):
            answer = self._get(f"{topic}/{rank}", until - time.monotonic())
            if answer is not None:
                told[rank] = Told(**answer)
        return told

    def _put(self, key: str, value: Told | Verdict) -> None:
        self._store.set(f"{self._name}/{key}", json.dumps(asdict(value)))

    def _get(self, key: str, wait_s: float) -> Any:
        """What was put there; None if nothing was in time."""
        full = f"{self._name}/{key}"
        try:
            self._store.wait([full], timedelta(seconds=max(0.01, wait_s)))
        except RuntimeError:
            if not self._store.check([full]):  # raises if the store is gone
                return None
        return json.loads(self._store.get(full))


def meet(job: str, rank: int, world_size: int, *, ranks_s: float, load_s: float) -> Meeting | None:
    """A load of all ranks; None where torch.distributed does not join just these.

    Args:
        ranks_s: Longest that ranks are waited for before the step is known.
        load_s: Longest that they are waited for while they bring it here.
    """
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_world_size() != world_size:
        return None
    counts = _rounds.setdefault(dist.group.WORLD, {})
    counts[job] = counts.get(job, 0) + 1
    store = dist.distributed_c10d._get_default_store()
    # Waiting locks a connection that others of this process use as well.
    store = store.clone() if hasattr(store, "clone") else store
    name = f"fastcheck/{job}/{counts[job]}"
    return Meeting(store, name, rank, world_size, ranks_s=ranks_s, load_s=load_s)


def alone(found: tuple[list[int], bool], world_size: int) -> int | None:
    """The step for a rank that has nobody to ask; raises InvalidArgumentError if only all could say which."""
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
