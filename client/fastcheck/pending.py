"""The steps of a session that are sealed and have no verdict yet, and what the daemon says of them.

Used under the session's lock. Bounded by the steps that may be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import ClosedError, FastCheckError, FencedError, NotNewerError
from .handle import SaveHandle, as_save_error


@dataclass(eq=False)
class _Step:
    handle: SaveHandle
    sealed: pb.Sealed


class PendingSteps:
    """By session and step: a process that loads again may seal a number anew."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], _Step] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def check_new(self, session: int, step: int) -> None:
        """Raise NotNewerError if a step has no verdict yet."""
        if (session, step) in self._steps:
            raise NotNewerError(f"step {step} is already under way: save a later one")

    def add(self, session: int, sealed: pb.Sealed, handle: SaveHandle) -> None:
        """One more."""
        self._steps[session, sealed.step] = _Step(handle, sealed)

    def sealed_again(self) -> Iterator[pb.Sealed]:
        """What a daemon is told of them on a new stream."""
        for (session, _), step in self._steps.items():
            again = pb.Sealed()
            again.CopyFrom(step.sealed)
            again.session = session
            yield again

    def on_progress(self, progress: pb.SaveProgress) -> bool:
        """Tell a handle where its step stands; whether the step failed because its session is over."""
        found = self._steps.get((progress.session, progress.step))
        if found is None:
            return False
        found.handle._absorb(progress)
        if not found.handle.done:
            return False
        del self._steps[progress.session, progress.step]
        return isinstance(found.handle.exception(), FencedError)

    def refuse(self, session: int, step: int, error: FastCheckError) -> bool:
        """The daemon does not take a step; whether it is one of these."""
        found = self._steps.pop((session, step), None)
        if found is not None:
            found.handle._finish(as_save_error(error))
        return found is not None

    def fail(self, error_of: Callable[[], FastCheckError]) -> None:
        """Nobody will say any more what becomes of them."""
        for step in self._steps.values():
            step.handle._finish(as_save_error(error_of()))
        self._steps.clear()

    def close(self) -> None:
        """Nobody listens any more."""
        for step in self._steps.values():
            step.handle._finish(
                ClosedError(
                    f"the Checkpointer was closed before step {step.handle.step} was committed; "
                    "the daemon goes on with it"
                )
            )
        self._steps.clear()
