"""When a save is due: every so many steps, every so many seconds, or whichever comes first.

By steps every rank knows it for itself. Clocks differ, so by seconds rank 0 decides for all, through torch.distributed.
To ask at every step would be a collective per step, and on a GPU a wait for the device; so rank 0 also says when
it is asked next: after half of the steps that fit into the time left. That is a handful of questions per save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .environment import ranks_here, whole_number
from .errors import InvalidArgumentError

#: Most steps between two questions: bounds how late a save is when steps become slower.
_PAUSE_MAX = 1000
#: What rank 0 says: whether a save is due, and how many steps later to ask again.
Say = tuple[bool, int]


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
    """Says at which steps to save; see `every`. With `seconds` and several ranks, all ranks ask at the same steps."""

    def __init__(
        self,
        step: int | None,
        seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[Say], Say] | None = None,
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
        """Whether to save after this step. Asked again for the same step, it answers the same.

        Raises:
            InvalidArgumentError: by seconds, several ranks, and no torch.distributed through which they could agree.
        """
        number = whole_number("step", step)
        if self._last is None or self._last[0] != number:
            by_step = self._step is not None and number % self._step == 0
            self._last = (number, self._by_time(number, by_step) or by_step)
        return self._last[1]

    __call__ = due

    def _by_time(self, step: int, by_step: bool) -> bool:
        """Whether the time is up; `by_step`: a save is due anyway, and the time begins anew."""
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

    def _say(self, step: int, now: float) -> Say:
        """What this rank would decide."""
        assert self._seconds is not None
        due = now >= self._due_at
        left_s = self._seconds if due else self._due_at - now
        if self._asked is None or step <= self._asked[0]:
            return due, 1
        step_s = (now - self._asked[1]) / (step - self._asked[0])
        return due, max(1, min(int(left_s / 2 / step_s), _PAUSE_MAX)) if step_s > 0 else 1


def _through_rank_0(mine: Say) -> Say:
    """Rank 0's word; this rank's own where there is one rank only."""
    if ranks_here() == 1:
        return mine
    from .exchanging import from_rank_0  # noqa: PLC0415  torch

    due, pause = from_rank_0([int(mine[0]), mine[1]])
    return bool(due), pause
