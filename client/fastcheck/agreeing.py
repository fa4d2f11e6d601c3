"""Ranks agree on what they load: one step, and on all of them or on none.

Where torch.distributed joins the ranks of the job, a load is for all of them. They speak through the store of its
default process group, not with collectives: a rank that does not come is waited for with a limit and named, and no
process group is left in pieces. Each rank tells the first one how it fares; that one decides and tells all. Twice:
which step it is, and, once each has all bytes and has checked them, that all may fill their states.

torchrun may keep a store over restarts, with all that the ranks before said in it. So rank 0 calls each load by a name
of its own, and a rank only believes an answer that says that it was heard. Nobody counts loads: a rank that fails
before it comes here, or tries more often than others, would be one behind or ahead for good.
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

#: Newest steps that a rank tells the others of.
STEPS_TOLD_MAX = 62
#: The first rank's answer comes this much later than it stops waiting itself.
_ANSWER_S = 15.0
#: Between two looks for rank 0's call and answer.
_LOOK_S, _LOOK_MAX_S = 0.01, 0.5
_WHY_MAX = 300
_RANKS_SHOWN_MAX = 16


@dataclass(frozen=True)
class Told:
    """How a rank fares: steps that it could load, whether found without the registry; or why it cannot."""

    steps: Sequence[int] = ()
    provisional: bool = False
    why: str = ""
    #: Of the process that says so.
    who: str = ""


@dataclass(frozen=True)
class Verdict:
    """What all ranks do: load `step`, or nothing, or raise `why`; `heard` are the processes that were asked."""

    step: int | None = None
    why: str = ""
    heard: Sequence[str] = field(default=(), compare=False)


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
        self._who = uuid.uuid4().hex[:16]
        #: Rank 0's name for this load, once it is known to be about this one.
        self._call = ""
        #: What is still to be said, so that nobody waits for it in vain.
        self._owes: Callable[[Told], Verdict] | None = self._agree_on_step

    def step(self, loadable: Callable[[], tuple[list[int], bool]]) -> int | None:
        """The newest step that all ranks can load; None when there is none.

        Raises:
            LoadFailedError: no step is there for all, another rank failed, or did not come.
            Whatever `loadable` raised.
        """
        steps, provisional = loadable()
        found = self._settle(self._agree_on_step, Told(sorted(steps)[-STEPS_TOLD_MAX:], provisional))
        if found.step is not None:
            self._owes = self._agree_to_fill
        return found.step

    def fill(self) -> None:
        """Returns when every rank has the step and has checked it; raises LoadFailedError when one has not."""
        self._settle(self._agree_to_fill, Told([0]))

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._owes is not None:
            # If the others cannot hear it they stop waiting by themselves.
            with contextlib.suppress(RuntimeError):
                self._owes(Told(why=_short(error)))

    def _settle(self, agree: Callable[[Told], Verdict], told: Told) -> Verdict:
        self._owes = None
        try:
            verdict = agree(told)
        except RuntimeError as error:
            raise LoadFailedError(
                f"the ranks cannot speak to each other through torch.distributed's store: {_short(error)}"
            ) from error
        if verdict.why:
            raise LoadFailedError(verdict.why)
        return verdict

    def _agree_on_step(self, told: Told) -> Verdict:
        told = replace(told, who=self._who)
        if self._rank == 0:
            self._call = self._who
            self._store.set(f"{self._name}/call", self._call)
            return self._decide("step", told, self._ranks_s)
        until = time.monotonic() + self._ranks_s + _ANSWER_S
        look_s = _LOOK_S
        while time.monotonic() < until:
            if self._store.check([f"{self._name}/call"]):
                call = self._store.get(f"{self._name}/call").decode()
                if call != self._call:
                    self._call = call
                    self._put(f"step/{self._rank}", told)
                answer = self._seen("step/verdict")
                if answer is not None and self._who in answer["heard"]:
                    return Verdict(**answer)
            time.sleep(look_s)
            look_s = min(2 * look_s, _LOOK_MAX_S)
        return Verdict(
            why=f"rank 0 did not hear this rank within {self._ranks_s:g} s: no rank has loaded anything"
        )

    def _agree_to_fill(self, told: Told) -> Verdict:
        if self._rank == 0:
            # If it failed itself, nobody has to be asked.
            return self._decide("filling", told, 0.0 if told.why else self._load_s)
        self._put(f"filling/{self._rank}", told)
        if told.why:
            return Verdict(why=told.why)
        answer = self._get("filling/verdict", self._load_s + _ANSWER_S)
        if answer is None:
            return Verdict(why=f"rank 0 did not load within {self._load_s:g} s")
        return Verdict(**answer)

    def _decide(self, topic: str, mine: Told, wait_s: float) -> Verdict:
        told = {0: mine}
        until = time.monotonic() + wait_s
        for rank in range(1, self._world_size) if wait_s else ():
            answer = self._get(f"{topic}/{rank}", until - time.monotonic())
            if answer is not None:
                told[rank] = Told(**answer)
        asked = self._world_size if wait_s else 1
        verdict = replace(decide(told, asked, wait_s), heard=[each.who for each in told.values()])
        self._put(f"{topic}/verdict", verdict)
        return verdict

    def _put(self, key: str, value: Told | Verdict) -> None:
        self._store.set(f"{self._name}/{self._call}/{key}", json.dumps(asdict(value)))

    def _seen(self, key: str) -> Any:
        full = f"{self._name}/{self._call}/{key}"
        return json.loads(self._store.get(full)) if self._store.check([full]) else None

    def _get(self, key: str, wait_s: float) -> Any:
        """What was put there; None if nothing was in time."""
        with contextlib.suppress(RuntimeError):  # if the store is gone, looking raises
            self._store.wait([f"{self._name}/{self._call}/{key}"], timedelta(seconds=max(0.01, wait_s)))
        return self._seen(key)


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
    store = dist.distributed_c10d._get_default_store()
    # Waiting locks a connection that others of this process use as well.
    store = store.clone() if hasattr(store, "clone") else store
    return Meeting(store, f"fastcheck/{job}", rank, world_size, ranks_s=ranks_s, load_s=load_s)


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
