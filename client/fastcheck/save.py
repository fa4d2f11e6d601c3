"""Saves of one rank: from a flattened state to a sealed segment. Nothing here raises into a training loop (G4)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastcheck_proto.conventions import LAYOUT_BYTES_MAX

from .errors import FastCheckError, OutOfMemoryError, SaveFailedError, StateChangedError
from .handle import SaveHandle, as_save_error
from .lazy import Fence
from .replicated.sharing import Shared, SharedSaves
from .session import Session
from .shared_memory import record_bytes
from .state.flatten import FlatState
from .transport import Staging, Transport, sealed_of

logger = logging.getLogger("fastcheck")

#: Of steps in flight.
COUNT_MAX = 1024


class FailureLog:
    """Warns once per kind of failure: a training loop saves thousands of times."""

    def __init__(self) -> None:
        self._seen: set[type[FastCheckError]] = set()

    def note(self, step: int, error: FastCheckError) -> None:
        """Log a failed save."""
        first = type(error) not in self._seen
        self._seen.add(type(error))
        logger.log(
            logging.WARNING if first else logging.DEBUG,
            "step %d was not saved, training goes on (%s; logged once per kind): %s",
            step,
            type(error).__name__,
            error,
        )


class Saves:
    """All saves of a Checkpointer. `begin` and `prepare` are called under its lock, after `fence.settle`."""

    def __init__(self, session: Session, transport: Transport, shared: SharedSaves | None) -> None:
        self._session = session
        self._transport = transport
        self._shared = shared
        self._failures = FailureLog()
        self.fence = Fence()
        #: Tensors that were seen to change without a fence. Bounded by the names in the caller's states.
        self.restless: set[str] = set()

    def begin(self, handle: SaveHandle, flat: FlatState, whole: Shared | None) -> None:
        """Copy what may not wait and see to the rest; what goes wrong is in the handle."""
        handle._on_failure = self._failures.note
        error = self._attempt(lambda: self._begin(handle, flat, whole))
        if error is not None:
            handle._finish(as_save_error(error))

    def prepare(self, flat: FlatState, state_bytes: int) -> None:
        """Have memory set aside for states of this size; that nobody is there to do so is only logged.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        layout_bytes = min(LAYOUT_BYTES_MAX, record_bytes(sealed_of(0, flat)))
        # What the state will grow by has a layout, too.
        room = layout_bytes * state_bytes // max(1, flat.state_bytes) + layout_bytes
        error = self._attempt(lambda: self._transport.prepare(state_bytes, room))
        if isinstance(error, OutOfMemoryError):
            raise error
        if error is not None:
            logger.info("the first save will not be prepared: %s", error)

    def _attempt(self, action: Callable[[], None]) -> FastCheckError | None:
        try:
            action()
        except FastCheckError as error:
            return error
        except Exception as error:
            # G4: nothing of ours ends a training loop.
            logger.exception("a save met a defect in FastCheck")
            return SaveFailedError(f"defect in FastCheck while saving: {error!r}")
        return None

    def _begin(self, handle: SaveHandle, flat: FlatState, whole: Shared | None) -> None:
        if self._shared is not None and whole is not None:
            flat = self._shared.compared(flat, whole, handle.step)
        staging = self._transport.begin(handle.step, flat)
        if flat.watched:
            self.fence.begin(handle, staging, lambda: self._finish_lazily(handle, staging))
        else:
            staging.finish(handle)

    def _finish_lazily(self, handle: SaveHandle, staging: Staging) -> None:
        """In the background. Until this ends no other save or load begins: `settle` comes first."""
        error = self._attempt(lambda: staging.finish(handle))
        if error is not None:
            if isinstance(error, StateChangedError):
                self.restless.update(error.names)
            handle._finish(as_save_error(error))
