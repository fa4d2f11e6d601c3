"""How often to save: the interval that loses least time, what saves cost, and policies that say when one is due.

The arithmetic (`advise`, `goodput`, `young`, `daly`) is pure, on seconds. The model:

- The loop trains for `interval` seconds, then a save stalls it for `stall` seconds, and so on.
- A step is committed `commit` seconds after its save returned; training goes on meanwhile.
- Failures are a Poisson process, one per `mtbf` seconds on average. One costs `restore` seconds (noticing it, starting
  again, loading) and throws the run back to the newest *committed* step. A further failure during a restore begins it
  again.

To first order a failure therefore costs interval/2 + commit + restore, and each interval costs `stall`. Balancing the
two gives Young's sqrt(2 stall mtbf) (J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974). Daly's higher-order estimate stays right when the interval is not small against
mtbf (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22(3), 2006). Neither depends on commit or restore: a late commit costs the same at every interval.

A policy (`every`) by steps needs no agreement: each rank knows the step. Clocks differ, so by seconds rank 0 decides
for all, through torch.distributed. Asking at every step would be a collective per step, and on a GPU a wait for the
device, so rank 0 also says when to ask next: after half of the steps that fit into the time left. That is a handful of
questions per save.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .config import ranks_here, whole_number
from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from .handle import SaveHandle


def young(stall_s: float, mtbf_s: float) -> float:
    """Young's first-order interval: seconds of training between two saves."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Daly's higher-order interval: seconds of training between two saves."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(stall_s / (2 * mtbf_s))
    return young(stall_s, mtbf_s) * (1 + x / 3 + x * x / 9) - stall_s


def goodput(interval_s: float, stall_s: float, commit_s: float, restore_s: float, mtbf_s: float) -> float:
    """The share of time spent on training that is kept, 0 to 1. Exact for the model above.

    Between two failures lie mtbf seconds on average, plus a restore. The n-th save of such a stretch counts if the
    stretch lasts until it is committed, n (interval + stall) + commit seconds; each that counts is worth `interval`.
    """
    period = (interval_s + stall_s) / mtbf_s
    # exp(period) - 1 overflows where nothing is ever committed.
    if period > 700:
        return 0.0
    return interval_s / mtbf_s * math.exp(-(restore_s + commit_s) / mtbf_s) / math.expm1(period)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """How often to save, and the consequences. Seconds unless a name says otherwise; `str()` explains it in words."""

    #: Save every so many steps; and how many seconds of training that is.
    steps: int
    interval_s: float
    #: Share of time that is kept training, at `steps` and at one save per step.
    goodput: float
    goodput_each_step: float
    #: First-order shares that are lost to saving, to repeated work, to restoring.
    lost_to_stall: float
    lost_to_rework: float
    lost_to_restore: float
    #: The figures that it was computed from.
    step_s: float
    stall_s: float
    commit_s: float
    busy_s: float
    restore_s: float
    mtbf_s: float
    #: The unrounded optima.
    young_s: float
    daly_s: float
    #: "failures": the optimum of costs; "copies": saves cannot be replicated faster; "steps": once per step is best.
    limited_by: str
    #: Where the failure rate comes from.
    mtbf_source: str = "given"

    def __str__(self) -> str:
        why = {
            "failures": "More often would stall training for longer than it saves; less often would repeat more work "
            "after a failure.",
            "copies": f"More often would pay, but a save keeps the copies busy for {_time(self.busy_s)}, and the "
            "next one would wait for it.",
            "steps": "Saving costs so little that once per step is best.",
        }[self.limited_by]
        every = "every step" if self.steps == 1 else f"every {self.steps} steps"
        return (
            f"Save {every} ({_time(self.interval_s)} of training): {self.goodput:.2%} of the time is training that is "
            f"kept. {why}\n"
            f"Lost: {self.lost_to_stall:.3%} to saves ({_time(self.stall_s)} each), {self.lost_to_rework:.3%} to work "
            f"done again (half an interval and {_time(self.commit_s)} until a commit, per failure), "
            f"{self.lost_to_restore:.3%} to restores ({_time(self.restore_s)} each).\n"
            f"Reckoned with a failure per {_time(self.mtbf_s)} ({self.mtbf_source}) and {_time(self.step_s)} per step. "
            f"Young's interval is {_time(self.young_s)}, Daly's {_time(self.daly_s)}; saving each step would keep "
            f"{self.goodput_each_step:.2%}."
        )


def advise(
    *,
    step_s: float,
    stall_s: float,
    mtbf_s: float,
    commit_s: float = 0.0,
    busy_s: float = 0.0,
    restore_s: float = 0.0,
    mtbf_source: str = "given",
) -> Advice:
    """The number of steps between saves that loses least time.

    Args:
        step_s: a training step without a save.
        stall_s: what a save holds training up (`handle.stats`: `blocked_s` - `waited_s`).
        mtbf_s: mean time between failures of the whole job: that of a node divided by the number of nodes.
        commit_s: from the return of `save` until the step is committed.
        busy_s: how long a save's copies are under way (`replicate_s`): saves follow one another no faster.
        restore_s: from a failure until training goes on.

    Raises:
        InvalidArgumentError: a figure is not finite, or negative; `step_s` or `mtbf_s` is not above 0.
    """
    figures = {
        "step_s": step_s,
        "stall_s": stall_s,
        "mtbf_s": mtbf_s,
        "commit_s": commit_s,
        "busy_s": busy_s,
        "restore_s": restore_s,
    }
    for name, value in figures.items():
        if not math.isfinite(value) or value < 0 or (value == 0 and name in ("step_s", "mtbf_s")):
            raise InvalidArgumentError(
                f"{name} = {value!r} must be a number of seconds{' above 0' if value == 0 else ''}"
            )

    def kept(steps: int) -> float:
        return goodput(steps * step_s, stall_s, commit_s, restore_s, mtbf_s)

    best = daly(stall_s, mtbf_s)
    below = max(1, math.floor(best / step_s))
    steps = max((below, below + 1), key=kept)
    least = max(1, math.ceil((busy_s - stall_s) / step_s))
    limited_by = "copies" if steps < least else "steps" if steps == 1 else "failures"
    steps = max(steps, least)
    interval_s = steps * step_s
    return Advice(
        steps=steps,
        interval_s=interval_s,
        goodput=kept(steps),
        # Saves that follow too fast wait for the copies of those before.
        goodput_each_step=goodput(step_s, max(stall_s, busy_s - step_s), commit_s, restore_s, mtbf_s),
        lost_to_stall=stall_s / (interval_s + stall_s),
        lost_to_rework=((interval_s + stall_s) / 2 + commit_s) / mtbf_s,
        lost_to_restore=restore_s / mtbf_s,
        step_s=step_s,
        stall_s=stall_s,
        commit_s=commit_s,
        busy_s=busy_s,
        restore_s=restore_s,
        mtbf_s=mtbf_s,
        young_s=young(stall_s, mtbf_s),
        daly_s=best,
        limited_by=limited_by,
        mtbf_source=mtbf_source,
    )


#: The registry's reason for a node that stopped in good order: no failure.
_LEFT = "left"


def observed_mtbf(transitions: Sequence[Mapping[str, Any]], now_s: float) -> tuple[float, str]:
    """Mean time between failures of any node, from `AdminClient.history()["transitions"]`, and its source in words.

    Counts the nodes that went DOWN without leaving in good order, since the oldest change in the history. If there are
    none, the result is the length of the history: the failure rate is then at most about one per that time.

    Args:
        now_s: seconds since 1970.

    Raises:
        InvalidArgumentError: the history is empty.
    """
    moments = [datetime.datetime.fromisoformat(t["at"]).timestamp() for t in transitions if t["at"]]
    watched_s = now_s - min(moments, default=now_s)
    if watched_s <= 0:
        raise InvalidArgumentError("the registry remembers no failures to reckon with: give mtbf_s")
    failures = sum(1 for t in transitions if t["at"] and t["to"] == "DOWN" and t["reason"] != _LEFT)
    seen = "no node failed" if not failures else f"{failures} failure{'s' if failures > 1 else ''} of nodes"
    return watched_s / max(1, failures), f"{seen} in {_time(watched_s)}"


def _time(seconds: float) -> str:
    """A duration for people: `1.5 h`."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


#: Medians are taken over this many saves.
REMEMBERED_MAX = 64


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Medians, in seconds; see `advice.advise`."""

    step_s: float
    stall_s: float
    commit_s: float
    busy_s: float


class Measured:
    """The last saves of one Checkpointer."""

    def __init__(self) -> None:
        self._handles: deque[SaveHandle] = deque(maxlen=REMEMBERED_MAX)

    def note(self, handle: SaveHandle) -> None:
        """A save has begun and returned."""
        self._handles.append(handle)

    def costs(self, step_s: float | None = None) -> Costs | None:
        """The median costs; None while no save is committed, or while the step time is neither given nor measured."""
        done = [handle for handle in self._handles if handle.committed]
        steps = self._steps() if step_s is None else [step_s]
        if not done or not steps:
            return None
        stats = [handle.stats for handle in done]
        return Costs(
            step_s=statistics.median(steps),
            # Waiting for an older step is not a cost of a save, but of saving too often.
            stall_s=statistics.median(max(0.0, s["blocked_s"] - s["waited_s"]) for s in stats),
            commit_s=statistics.median(_commit_s(handle) for handle in done),
            busy_s=statistics.median(s["replicate_s"] for s in stats),
        )

    def _steps(self) -> list[float]:
        """Seconds per step from one save's return to the next one's call."""
        found = []
        handles = list(self._handles)
        for one, other in pairwise(handles):
            if other.step > one.step and one._returned_at is not None and other._began_at is not None:
                found.append((other._began_at - one._returned_at) / (other.step - one.step))
        return [seconds for seconds in found if seconds > 0]


def _commit_s(handle: SaveHandle) -> float:
    assert handle._ended_at is not None
    returned_at = handle._ended_at if handle._returned_at is None else handle._returned_at
    return max(0.0, handle._ended_at - returned_at)


#: Most steps between two questions to rank 0: bounds how late a save is when steps become slower.
_PAUSE_MAX = 1000
#: Rank 0's answer: whether a save is due, and how many steps later to ask again.
Answer = tuple[bool, int]


def every(step: int | None = None, seconds: float | None = None) -> Every:
    """A policy: `if policy(step): ckpt.save(step, state)`.

    Args:
        step: due at multiples of this. Without `seconds` and without this, at every step.
        seconds: due when so much time has passed since the last time it was due. With `step`, whichever comes first.

    Raises:
        InvalidArgumentError: not above 0.
    """
    return Every(step if step is not None or seconds is not None else 1, seconds)


class Every:
    """The policy that `every` returns. With `seconds` and several ranks, all ranks ask rank 0 at the same steps."""

    def __init__(
        self,
        step: int | None,
        seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[Answer], Answer] | None = None,
    ) -> None:
        self._step = None if step is None else whole_number("step", step)
        if self._step is not None and self._step < 1:
            raise InvalidArgumentError(f"step = {step!r} must be above 0")
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise InvalidArgumentError(f"seconds = {seconds!r} must be above 0")
        self._seconds = seconds
        self._clock = clock
        self._agree = agree or _through_rank_0
        self._due_at = clock() + (seconds or 0.0)
        #: When rank 0 was asked last, and the next step at which it is.
        self._asked: tuple[int, float] | None = None
        self._ask_at: int | None = None
        self._last: tuple[int, bool] | None = None

    def due(self, step: int) -> bool:
        """Whether to save after this step. The same step gets the same answer.

        Raises:
            InvalidArgumentError: with `seconds` and several ranks, torch.distributed is not initialised.
        """
        number = whole_number("step", step)
        if self._last is None or self._last[0] != number:
            by_step = self._step is not None and number % self._step == 0
            self._last = (number, self._by_time(number, by_step) or by_step)
        return self._last[1]

    __call__ = due

    def _by_time(self, step: int, by_step: bool) -> bool:
        """Whether the time is up. `by_step`: a save is due anyway, and the time starts again."""
        if self._seconds is None:
            return False
        if by_step:  # known to all ranks: nothing to agree on
            self._due_at = self._clock() + self._seconds
            self._ask_at = None
            return False
        if self._ask_at is not None and self._asked is not None and self._asked[0] < step < self._ask_at:
            return False
        now = self._clock()
        due, pause = self._agree(self._say(step, now))
        if due:
            self._due_at = now + self._seconds
        self._asked, self._ask_at = (step, now), step + pause
        return due

    def _say(self, step: int, now: float) -> Answer:
        """The answer that this rank would give."""
        assert self._seconds is not None
        due = now >= self._due_at
        left_s = self._seconds if due else self._due_at - now
        if self._asked is None or step <= self._asked[0]:
            return due, 1
        step_s = (now - self._asked[1]) / (step - self._asked[0])
        return due, max(1, min(int(left_s / 2 / step_s), _PAUSE_MAX)) if step_s > 0 else 1


def _through_rank_0(mine: Answer) -> Answer:
    """Rank 0's answer; this rank's own where there is only one rank."""
    if ranks_here() == 1:
        return mine
    from .collectives import from_rank_0  # noqa: PLC0415  torch

    due, pause = from_rank_0([int(mine[0]), mine[1]])
    return bool(due), pause
