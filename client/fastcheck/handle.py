"""One save, as the training loop sees it: a promise that never raises until it is asked for its result.

`PendingSteps` has the handles of the steps that the daemon has still to judge.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import (
    ClosedError,
    FastCheckError,
    FencedError,
    InvalidArgumentError,
    LoadFailedError,
    NotNewerError,
    ReplicasDisagreeError,
    SaveFailedError,
    SaveTimeoutError,
    from_code,
)


class SaveHandle:
    """Follows one save. Safe to use from any thread.

    `staged`: the bytes are in the daemon's hands and `state` may change. `replicated`: every shard of
    this rank is acknowledged by its holders. `provisional`: it is, and there is no registry that could commit the
    step; it is committed later if it can be. `committed`: so are those of all ranks; only now is anything promised.
    """

    def __init__(self, step: int, state_bytes: int = 0) -> None:
        self.step = step
        self._condition = threading.Condition()
        self._error: FastCheckError | None = None
        self._done = False
        self._staged = False
        self._replicated = False
        self._provisional = False
        self._committed = False
        #: The daemon has said something of it.
        self._told = False
        #: Told of a step and why it was not saved.
        self._on_failure: Callable[[int, FastCheckError], object] = lambda _step, _error: None
        #: Monotonic seconds: when `save` was called and had returned, and when the handle ended.
        self._began_at: float | None = None
        self._returned_at: float | None = None
        self._ended_at: float | None = None
        self._stats: dict[str, Any] = {
            "bytes": state_bytes,
            "encoded_bytes": 0,
            "ratio": None,
            "codecs": {},
            "lossy": False,
            "encode_s": 0.0,
            "waited_s": 0.0,
            "stage_s": 0.0,
            "blocked_s": 0.0,
            "lazy_bytes": 0,
            "replicate_s": 0.0,
            "commit_s": 0.0,
            "copies": 0,
            "resent_shards": 0,
            "provisional": False,
            "memory": "",
        }

    @property
    def staged(self) -> bool:
        """The daemon has the bytes."""
        return self._staged

    @property
    def replicated(self) -> bool:
        """This rank's copies are acknowledged by their holders."""
        return self._replicated

    @property
    def provisional(self) -> bool:
        """Replicated while the registry does not answer, and not committed yet: nothing is promised.

        Without the registry it can be loaded by `load(state, allow_provisional=True)`.
        """
        return self._provisional

    @property
    def committed(self) -> bool:
        """The step is committed: it survives as many losses as the cluster tolerates."""
        return self._committed

    @property
    def done(self) -> bool:
        """Committed, failed, or nothing to do because FastCheck is disabled."""
        return self._done

    @property
    def stats(self) -> Mapping[str, Any]:
        """What is known so far.

        `bytes` of the state, `encoded_bytes` sent to all holders divided by the number of `copies`, their
        `ratio` (None until known), `codecs`: what each did, name → `raw_bytes` and `encoded_bytes` per copy;
        `lossy`: whether the bytes are those of a lossy coding that you asked for; `resent_shards`; `provisional`:
        whether it was replicated while the registry did not answer; `memory`: what the node has set aside for this
        rank, "full" or, where memory is short, "lean" (docs/operations.md); `lazy_bytes`: copied after `save` had
        returned; and the seconds `waited_s` (for older steps), `stage_s` (copying), `blocked_s` (that the
        training thread spent in `save` and waiting at fences), `encode_s` (of threads), `replicate_s` and `commit_s`.
        Zero until known.
        """
        with self._condition:
            return MappingProxyType(dict(self._stats))

    def result(self, timeout: float | None = None) -> SaveHandle:
        """Wait until the step is committed and return this handle.

        Raises:
            SaveTimeoutError: not done within `timeout` seconds; the save goes on.
            FastCheckError: what went wrong.
        """
        if not self._wait(timeout):
            raise SaveTimeoutError(
                f"step {self.step} is not committed after {timeout:g} s ({self._progress()}); "
                "it goes on: ask again"
            )
        if self._error is not None:
            raise self._error
        return self

    def exception(self, timeout: float | None = 0) -> FastCheckError | None:
        """What went wrong, or None: nothing did, or not yet. Waits at most `timeout` seconds for the end."""
        self._wait(timeout)
        return self._error

    def wait_staged(self, timeout: float | None = None) -> SaveHandle:
        """Wait until the daemon has the bytes, or the save has failed, and return this handle.

        Either way `state` may change then. Only after `save(lazy=True)` is there anything to wait for.

        Raises:
            SaveTimeoutError: not so within `timeout` seconds; `state` must stay as it is.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._staged or self._done, timeout):
                raise SaveTimeoutError(
                    f"step {self.step} is not staged after {timeout:g} s: its state must not change yet; ask again"
                )
        return self

    def wait_replicated(self, timeout: float | None = None) -> SaveHandle:
        """Wait until this rank's copies are acknowledged by their holders and return this handle.

        Other ranks' may not be yet, so nothing is promised: that is for `result`.

        Raises:
            SaveTimeoutError: not so within `timeout` seconds; the save goes on.
            FastCheckError: what went wrong.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._replicated or self._done, timeout):
                raise SaveTimeoutError(
                    f"step {self.step} is not replicated after {timeout:g} s ({self._progress()}); "
                    "it goes on: ask again"
                )
        if self._error is not None and not self._replicated:
            raise self._error
        return self

    def _wait(self, timeout: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._done, timeout)

    def _progress(self) -> str:
        if self._provisional:
            return "provisional: this rank is replicated, and the registry does not answer"
        if self._replicated:
            return "this rank is replicated, others are not yet"
        return "staged, not replicated yet" if self._staged else "not staged"

    def __repr__(self) -> str:
        if self._error is not None:
            state = f"failed: {self._error}"
        elif self._committed:
            state = "committed"
        else:
            state = "done" if self._done else self._progress()
        return f"<SaveHandle step {self.step}: {state}>"

    # What follows is called by the SDK only.

    def _stage(self, waited_s: float, stage_s: float, lazy_bytes: int = 0, contract: str = "") -> None:
        with self._condition:
            self._staged = True
            self._stats.update(waited_s=waited_s, stage_s=stage_s, lazy_bytes=lazy_bytes, memory=contract)
            self._condition.notify_all()

    def _block(self, seconds: float) -> None:
        """The training thread was held up for so long."""
        with self._condition:
            self._stats["blocked_s"] += seconds
            if self._returned_at is None:
                self._returned_at = time.monotonic()
                self._began_at = self._returned_at - seconds

    def _absorb(self, update: pb.SaveProgress) -> None:
        """Take over what the daemon reported."""
        with self._condition:
            self._told = True
            state_bytes, encoded_bytes = self._stats["bytes"], update.encoded_bytes
            self._stats.update(
                encoded_bytes=encoded_bytes,
                ratio=state_bytes / encoded_bytes if encoded_bytes else None,
                codecs={
                    use.codec: {"raw_bytes": use.raw_bytes, "encoded_bytes": use.encoded_bytes}
                    for use in update.codecs
                },
                lossy=update.lossy,
                encode_s=update.encode_s,
                replicate_s=update.replicate_s,
                commit_s=update.commit_s,
                copies=update.copies,
                resent_shards=update.resent_shards,
            )
            if update.state == pb.SAVE_STATE_PROVISIONAL:
                self._stats["provisional"] = True
            self._provisional = update.state == pb.SAVE_STATE_PROVISIONAL
            self._replicated = self._replicated or update.state in (
                pb.SAVE_STATE_REPLICATED,
                pb.SAVE_STATE_PROVISIONAL,
                pb.SAVE_STATE_COMMITTED,
            )
            self._committed = update.state == pb.SAVE_STATE_COMMITTED
            self._condition.notify_all()
        if update.state == pb.SAVE_STATE_COMMITTED:
            self._finish()
        elif update.state == pb.SAVE_STATE_FAILED:
            self._finish(as_save_error(_error_of(update)))

    def _finish(self, error: FastCheckError | None = None) -> None:
        """End it, once."""
        with self._condition:
            if self._done:
                return
            self._error = error
            self._done = True
            self._ended_at = time.monotonic()
            self._condition.notify_all()
        if error is not None and not isinstance(error, ClosedError):
            self._on_failure(self.step, error)


def _error_of(update: pb.SaveProgress) -> FastCheckError:
    error = from_code(update.error.code, update.error.message)
    if not isinstance(error, ReplicasDisagreeError) or not update.disagreements:
        return error
    return ReplicasDisagreeError(
        f"{update.error.message}. Load the newest committed step on those ranks, and look at their memory; what may "
        "differ between ranks belongs under per_rank=",
        {found.part: tuple(found.ranks) for found in update.disagreements},
        minority=all(found.minority for found in update.disagreements),
    )


def as_save_error(error: FastCheckError) -> FastCheckError:
    """The same failure as the save's: codes such as NOT_FOUND otherwise read as if a load had failed."""
    if type(error) is FastCheckError or isinstance(error, LoadFailedError | InvalidArgumentError):
        return SaveFailedError(str(error))
    return error


@dataclass(eq=False)
class _Step:
    handle: SaveHandle
    sealed: pb.Sealed


class PendingSteps:
    """The sealed steps of a session that have no verdict yet, and what the daemon says of them.

    By session and step: a process that loads again may seal a number anew. Used under the session's lock, and bounded
    by the steps that may be under way.
    """

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
