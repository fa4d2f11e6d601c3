"""Saves of one rank: from a flattened state to a sealed segment, and what is told of it. Nothing here raises (G4)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastcheck_proto.conventions import STEP_MAX
from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import FastCheckError, FencedError, SaveFailedError, StateChangedError
from .fencing import Fence
from .following import Follower
from .handle import SaveHandle, as_save_error
from .pausing import FailureLog, Pause
from .replicated.sharing import Shared, SharedSaves
from .seat import Seat
from .state.flatten import FlatState
from .transport import Patience, Staging, Transport

logger = logging.getLogger("fastcheck")

#: Taking the rank's place goes through the registry, which may just be choosing a leader.
_SESSION_S = 5.0
_SESSION_AGAIN_S = 1.0
#: Of steps in flight.
COUNT_MAX = 1024


class Saves:
    """All saves of a Checkpointer. `begin` and `prepare` are called under its lock, after `fence.settle`."""

    def __init__(
        self, seat: Seat, transport: Transport, shared: SharedSaves | None, max_in_flight: int
    ) -> None:
        self._seat = seat
        self._transport = transport
        self._shared = shared
        self._max_in_flight = max_in_flight
        self._pause = Pause()
        self._failures = FailureLog()
        self._followers: list[Follower] = []
        self.fence = Fence()
        #: Tensors that were seen to change without a fence. Bounded by the names in the caller's states.
        self.restless: set[str] = set()

    def begin(self, handle: SaveHandle, flat: FlatState, whole: Shared | None) -> None:
        """Copy what may not wait and see to the rest; what goes wrong is in the handle."""
        error = self._pause.error or self._attempt(lambda: self._begin(handle, flat, whole))
        if error is not None:
            self._fail(handle, error)

    def prepare(self, state_bytes: int) -> None:
        """Have memory made ready for states of this size; that it cannot be is only logged."""
        error = self._attempt(lambda: self._prepare(state_bytes))
        if error is not None:
            logger.info("the first save will not be prepared: %s", error)

    def close(self) -> None:
        """Handles end soon after the daemon's link was closed; wait for them a little."""
        for follower in self._followers:
            follower.thread.join(timeout=2.0)
        self._followers.clear()

    def _prepare(self, state_bytes: int) -> None:
        request = self._request(STEP_MAX, state_bytes)
        request.max_in_flight = COUNT_MAX  # nothing is saved, so there is nothing to wait for
        self._transport.prepare(request, Patience(self._pause.connect_s, self._seat.timeout_s))

    def _attempt(self, action: Callable[[], None]) -> FastCheckError | None:
        error: FastCheckError | None = None
        try:
            action()
        except FastCheckError as found:
            error = found
        except Exception as found:
            # G4: nothing of ours ends a training loop.
            logger.exception("a save met a defect in FastCheck")
            error = SaveFailedError(f"defect in FastCheck while saving: {found!r}")
        self._pause.note(error)
        return error

    def _request(self, step: int, state_bytes: int) -> pb.BeginSaveRequest:
        seat = self._seat
        session_s = min(_SESSION_AGAIN_S if self._pause.failing else _SESSION_S, seat.timeout_s)
        return pb.BeginSaveRequest(
            job=seat.job,
            rank=seat.rank,
            world_size=seat.world_size,
            session=seat.take(Patience(self._pause.connect_s, session_s)),
            step=step,
            state_bytes=state_bytes,
            max_in_flight=self._max_in_flight,
        )

    def _begin(self, handle: SaveHandle, flat: FlatState, whole: Shared | None) -> None:
        if self._shared is not None and whole is not None:
            flat = self._shared.compared(flat, whole, handle.step)
        request = self._request(handle.step, flat.state_bytes)
        session = request.session
        patience = Patience(self._pause.connect_s, self._seat.timeout_s)
        try:
            staging = self._transport.begin(request, flat, patience)
        except FencedError:
            self._seat.fenced(session)
            raise
        if flat.watched:
            self.fence.begin(handle, staging, lambda: self._finish_lazily(handle, staging, session))
        else:
            self._finish(handle, staging, session)

    def _finish_lazily(self, handle: SaveHandle, staging: Staging, session: int) -> None:
        """In the background. Until this ends no other save or load begins: `settle` comes first."""
        error = self._attempt(lambda: self._finish(handle, staging, session))
        if error is not None:
            if isinstance(error, StateChangedError):
                self.restless.update(error.names)
            self._fail(handle, error)

    def _finish(self, handle: SaveHandle, staging: Staging, session: int) -> None:
        staged = staging.finish()
        handle._stage(staged.waited_s, staged.stage_s, staged.lazy_bytes)
        watch = pb.WatchSaveRequest(
            job=self._seat.job, rank=self._seat.rank, session=session, step=handle.step
        )
        self._followers = [f for f in self._followers if f.thread.is_alive()]
        self._followers.append(
            Follower(
                handle,
                self._seat.daemon,
                watch,
                self._seat.closing,
                lambda done: self._followed(done, session),
                self._transport.warm,
            )
        )

    def _followed(self, handle: SaveHandle, session: int) -> None:
        if isinstance(handle.exception(), FencedError):
            self._seat.fenced(session)
        self._ended(handle)

    def _fail(self, handle: SaveHandle, error: FastCheckError) -> None:
        handle._finish(as_save_error(error))
        self._ended(handle)

    def _ended(self, handle: SaveHandle) -> None:
        error = handle.exception()
        if error is not None and not self._seat.closing.is_set():
            self._failures.note(handle.step, error)
