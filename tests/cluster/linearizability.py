"""Is there an order in which a concurrent history of the registry would be right? A checker, and a model of one job.

Wing and Gong's search, with the states that were met before remembered (Lowe): an operation may come next if it was
called before any other that is left had returned. Operations without a known outcome may have happened at any time
after their call, or never. Each job's history is checked by itself, as jobs share nothing. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

#: Situations looked at before the search gives up; a history of a few hundred operations needs some thousands.
SITUATIONS_MAX = 2_000_000

Kind = Literal["open", "commit", "lookup"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of one client. `called_at` and `returned_at` are times of one clock."""

    kind: Kind
    client: str
    called_at: float
    #: Infinite: no answer came, or one that does not say whether it happened.
    returned_at: float = math.inf
    #: commit: the step. lookup: the newest step that was answered, 0 when there is none.
    step: int = 0
    #: commit: under which session. open: the one that was answered.
    session: int = 0
    #: commit: what was answered.
    outcome: Literal["committed", "fenced", "not newer", ""] = ""

    @property
    def known(self) -> bool:
        """Whether it is known to have happened as it says."""
        return self.returned_at < math.inf

    def __str__(self) -> str:
        answers = {"open": f"session {self.session}", "lookup": f"step {self.step}", "commit": self.outcome}
        said = answers[self.kind]
        asked = f"({self.step}, session {self.session})" if self.kind == "commit" else "()"
        until = f"{self.returned_at:.3f}" if self.known else "?"
        return f"{self.called_at:.3f}..{until} {self.client}: {self.kind}{asked} -> {said if self.known else '?'}"


@dataclass(frozen=True)
class JobModel:
    """What a job of one rank may do: newest step and sessions only grow, and a session's end is final."""

    newest: int = 0
    #: The highest session that anybody has been told of.
    session: int = 0
    #: Whether that one is current; if not, a process has the seat that never heard its number.
    current: bool = False

    def after(self, operation: Operation) -> JobModel | None:
        """The job after the operation with that answer; None: it would not have answered so."""
        if operation.kind == "lookup":
            return self if operation.step == self.newest else None
        if operation.kind == "open":
            if not operation.known:
                return replace(self, current=False)
            # Not the next number but a higher one: an opening whose answer was lost and that was repeated counts twice.
            higher = operation.session > self.session
            return JobModel(self.newest, operation.session, True) if higher else None
        seated = self.current and operation.session == self.session
        newer = operation.step > self.newest
        if operation.outcome == "fenced":
            return None if seated else self
        if operation.outcome == "not newer":
            return None if newer else self
        return replace(self, newest=operation.step) if seated and newer else None


@dataclass(frozen=True)
class Verdict:
    """Whether an order exists; if not, how far the best attempt came."""

    linearizable: bool
    #: The longest order found that is right.
    order: tuple[Operation, ...]
    #: What could have come next in it, and would have been answered differently.
    stuck: tuple[Operation, ...] = ()
    #: What is called next after that.
    later: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        if self.linearizable:
            return f"linearizable: {len(self.order)} operations"
        lines = ["not linearizable; the best order ends with", *map(str, self.order[-5:]), "and then none of"]
        return "\n  ".join([*lines, *map(str, self.stuck), "and later", *map(str, self.later)])


def check(history: Iterable[Operation], model: JobModel | None = None) -> Verdict:
    """Look for an order of one job's operations.

    Raises:
        OverflowError: the search takes too long to tell.
    """
    operations = sorted(history, key=lambda operation: operation.called_at)
    everything_known = sum(1 << i for i, operation in enumerate(operations) if operation.known)
    start = model or JobModel()
    seen: set[tuple[int, JobModel]] = {(0, start)}
    # Depth first; each entry has an order as a linked list, so that nothing is copied on the way.
    stack: list[tuple[int, JobModel, _Link | None]] = [(0, start, None)]
    best: tuple[int, _Link | None, tuple[Operation, ...]] = (-1, None, ())
    while stack:
        done, state, link = stack.pop()
        if done & everything_known == everything_known:
            return Verdict(True, _order(link))
        candidates = _next(operations, done)
        if done.bit_count() > best[0]:
            best = (done.bit_count(), link, tuple(operations[i] for i in candidates))
        for index in reversed(candidates):  # so that the first called is tried first
            after = state.after(operations[index])
            situation = (done | 1 << index, after)
            if after is None or situation in seen:
                continue
            if len(seen) >= SITUATIONS_MAX:
                raise OverflowError(f"no answer after {SITUATIONS_MAX} situations; record less at once")
            seen.add((done | 1 << index, after))
            stack.append((done | 1 << index, after, _Link(operations[index], link)))
    order, stuck = _order(best[1]), best[2]
    later = [o for o in operations if o not in order and o not in stuck]
    return Verdict(False, order, stuck, tuple(later[:3]))


@dataclass(frozen=True)
class _Link:
    operation: Operation
    before: _Link | None


def _order(link: _Link | None) -> tuple[Operation, ...]:
    found = []
    while link is not None:
        found.append(link.operation)
        link = link.before
    return tuple(reversed(found))


def _next(operations: list[Operation], done: int) -> list[int]:
    """Operations that may come next: called before any other that is left returned."""
    candidates = []
    first_return = math.inf
    for index, operation in enumerate(operations):  # by time of call
        if done >> index & 1:
            continue
        if operation.called_at > first_return:
            break
        candidates.append(index)
        first_return = min(first_return, operation.returned_at)
    return [i for i in candidates if operations[i].called_at <= first_return]
