"""All that a data process knows of one rank: its session, its memory, and which of its steps are under way.

Kept apart from `coordinator.py` and `segment_supply.py`, which act on it: nothing here waits, sends or frees. Owned
by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import SupersededError
from ..store.retention import PROVISIONAL_KEPT
from ..store.segments import Segment, staging_pool
from .contract import Contract
from .save import Save
from .session import TrainerSession

#: Finished saves remembered per rank, for trainers that ask late.
FINISHED_KEPT = 4
#: Steps given up before they were reported whose numbers are remembered for their holders.
OBSOLETE_MAX = 8
#: Likewise after they were reported. What is forgotten of them is ruled out with the next newer one.
GIVEN_UP_MAX = 64
#: Changes of the job's next session that are remembered, for saves that began before they are sealed.
NEXT_SESSIONS_MAX = 16


@dataclass(eq=False)
class RankState:
    """What one data process knows of a rank of a job."""

    job: str
    rank: int
    #: Of its newest trainer.
    session: int = 0
    #: Sealed, the oldest first; some finished ones too.
    saves: list[Save] = field(default_factory=list)
    #: Its last steps could not be committed for want of a registry or of other ranks: until one is, its trainer does
    #: not wait for what only waits itself.
    starved: bool = False
    #: Steps of its session that ended uncommitted although the registry may have heard that this rank is replicated:
    #: only the registry can say that they will never be committed (`given_up`).
    given_up: deque[int] = field(default_factory=lambda: deque(maxlen=GIVEN_UP_MAX))
    #: It is being asked to say so.
    ruling_out: asyncio.Task[bool] | None = None
    #: Steps of its session given up that nobody was told of: their provisional copies may go.
    obsolete: deque[int] = field(default_factory=lambda: deque(maxlen=OBSOLETE_MAX))
    #: The stream of its trainer; None: there is none now.
    stream: TrainerSession | None = None
    #: Whose process it is that has the session.
    client_id: str = ""
    #: Size of its largest state in this session, and of a segment for it; 0: not known.
    state_bytes: int = 0
    #: What is set aside for it; None: nothing was reserved yet.
    contract: Contract | None = None
    #: Segments that are set aside and not offered to its trainer.
    spare: list[Segment] = field(default_factory=list)
    #: Held while a segment is allocated for it, also when whoever asked for it has gone.
    allocating: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Steps are being looked for that its trainer says it has sealed before.
    finding: list[asyncio.Task[None]] = field(default_factory=list)
    #: Its memory is being brought to what the contract says.
    supplying: asyncio.Task[None] | None = None
    #: Moments, and the job's next session that was known from then on, the newest last.
    next_sessions: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NEXT_SESSIONS_MAX))

    @property
    def pool(self) -> str:
        """Of the segments of its session."""
        return staging_pool(self.job, self.rank, self.session)

    def note_next_session(self, number: int, now: float) -> None:
        """A view says that all sessions of the job below this one are open."""
        if number and (not self.next_sessions or self.next_sessions[-1][1] != number):
            self.next_sessions.append((now, number))

    def begun_after(self, began_at: float) -> int:
        """Below which number all sessions of the job were open when a save of this session began."""
        known = (number for at, number in self.next_sessions if at <= began_at)
        return max(self.session + 1, max(known, default=0))

    def under_way(self) -> list[Save]:
        """Steps that a newer one may have to wait for."""
        return [s for s in self.saves if not s.done and not s.provisional]

    def droppable(self) -> list[Save]:
        """Provisional steps that no report has named, the oldest first."""
        return sorted((s for s in self.saves if s.provisional and not s.reported), key=lambda s: s.key.step)

    def too_many(self) -> list[Save]:
        """The droppable steps that newer ones have made superfluous."""
        return self.droppable()[:-PROVISIONAL_KEPT]

    def uncommittable(self, keep: int = 0) -> list[Save]:
        """Provisional steps that a registry has heard of and other ranks do not save, the oldest first.

        But for those among the newest `keep` of all that is reported and will hardly be committed.
        """
        stalled = [
            s
            for s in self.saves
            if s.provisional and s.reported and isinstance(s.stalled_because, SupersededError)
        ]
        newest = sorted([*self.given_up, *(s.key.step for s in stalled)])[-keep:] if keep else []
        return sorted((s for s in stalled if s.key.step not in newest), key=lambda s: s.key.step)

    def may_report(self) -> bool:
        """Steps with undecided reports can never be dropped, so there are only so many."""
        return len([s for s in self.saves if s.reported and not s.done]) < PROVISIONAL_KEPT

    def begin_session(self, session: int) -> None:
        """A newer process speaks for the rank: what was remembered of the one before says nothing of its steps."""
        self.session = session
        self.contract = None
        self.state_bytes = 0
        self.obsolete.clear()
        self.given_up.clear()

    def below_step(self, keep: int) -> int:
        """Below which step the registry may rule out all that was given up, but for the newest `keep`; 0: none."""
        doomed = sorted(self.given_up)[: max(0, len(self.given_up) - keep)]
        under_way = min((s.key.step for s in self.saves if not s.done), default=None)
        if under_way is not None:
            doomed = [step for step in doomed if step < under_way]
        return doomed[-1] + 1 if doomed else 0

    def settled(self, below_step: int) -> None:
        """It is decided what became of the steps below `below_step`."""
        for step in [step for step in self.given_up if step < below_step]:
            self.given_up.remove(step)

    def find(self, step: int, session: int) -> Save | None:
        """A session's save, also one that ended lately."""
        return next((s for s in self.saves if s.key.step == step and s.session == session), None)

    def attach(self, save: Save, on_provisional: Callable[[Save], None]) -> None:
        """Let a save that is about to be sent know of the others."""
        save.after = next((s for s in reversed(self.saves) if not s.done), None)
        save.oldest_step = lambda: min([save.key.step, *(s.key.step for s in self.saves if not s.done)])
        save.may_report = self.may_report
        save.obsolete = lambda: tuple(self.obsolete)
        save.on_provisional = on_provisional
        save.sealed_at = time.monotonic()

    def add(self, save: Save) -> None:
        """One more, that is sealed; the oldest of the finished ones are forgotten."""
        finished = [s for s in self.saves if s.done]
        for old in finished[: max(0, len(finished) - FINISHED_KEPT)]:
            self.saves.remove(old)
        self.saves.append(save)

    def busy(self) -> bool:
        """Whether a save of it has not ended, or something runs for it."""
        return any(not s.done for s in self.saves) or any(not task.done() for task in self.tasks())

    def tasks(self) -> list[asyncio.Task[Any]]:
        """All that is running for it."""
        found: list[asyncio.Task[Any] | None] = [s.task for s in self.saves]
        found += [self.supplying, self.ruling_out, *self.finding]
        if self.stream is not None:
            found.append(self.stream.reserving)
        return [task for task in found if task is not None]
