"""How often to save: the interval that loses least time, from what a save costs and how often something fails.

Pure arithmetic on seconds. The model:

- The loop trains for `interval` seconds, then a save stalls it for `stall` seconds, and so on.
- A step is committed `commit` seconds after its save returned; training goes on meanwhile.
- Failures come as a Poisson process, one per `mtbf` seconds on average. One costs `restore` seconds (noticing it,
  starting anew, loading) and throws the run back to the newest *committed* step. A further failure while restoring
  begins the restore anew.

What is lost per failure is so, to first order, interval/2 + commit + restore; per interval it is `stall`. Balancing
the two gives Young's sqrt(2 stall mtbf) (J. W. Young, "A first order approximation to the optimum checkpoint
interval", Communications of the ACM 17(9), 1974). Daly's higher-order estimate stays right when the interval is not
small against mtbf (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22(3), 2006). Neither depends on commit or restore: a late commit costs the same
at every interval.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgumentError


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
    """The share of time that is training which is kept: exact for the model above, 0 to 1.

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
    """What to do and what comes of it; seconds unless the name says otherwise. `str()` explains it in words."""

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
    #: What it was reckoned from.
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
    #: Where the failure rate is from.
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
    """Mean time between failures of any node, from `AdminClient.history()["transitions"]`, and how it was found.

    Counted are nodes that were called DOWN without having left in good order, since the oldest change that is
    remembered. Where none was, the time itself is taken: the rate is then at most about that.

    Args:
        now_s: seconds since 1970.

    Raises:
        InvalidArgumentError: nothing is remembered.
    """
    moments = [datetime.datetime.fromisoformat(t["at"]).timestamp() for t in transitions if t["at"]]
    watched_s = now_s - min(moments, default=now_s)
    if watched_s <= 0:
        raise InvalidArgumentError("the registry remembers no failures to reckon with: give mtbf_s")
    failures = sum(1 for t in transitions if t["at"] and t["to"] == "DOWN" and t["reason"] != _LEFT)
    seen = "no node failed" if not failures else f"{failures} failure{'s' if failures > 1 else ''} of nodes"
    return watched_s / max(1, failures), f"{seen} in {_time(watched_s)}"


def _time(seconds: float) -> str:
    """Seconds as a person says them."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"
