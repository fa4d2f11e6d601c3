"""`Checkpointer`: what a training loop calls. Puts the SDK's parts together and decides what raises.

In `save`, only what the caller can and must fix raises: a state that cannot be saved, a bad step, use
after close. Whatever the daemon, its peers or the registry do is in the handle. `load` raises: a
trainer that cannot load must know before it trains.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

from fastcheck_proto.conventions import STEP_MAX
from fastcheck_proto.v1 import trainer_pb2 as pb

from .agreeing import agree_on_step
from .connection import Connection, parse_address
from .copying import contiguous_bytes, default_copy_threads
from .daemon import CONNECT_S, Daemon
from .environment import resolve, whole_number
from .errors import (
    ClosedError,
    DaemonUnavailableError,
    FastCheckError,
    InvalidArgumentError,
    LoadFailedError,
    RegistryUnavailableError,
    SaveFailedError,
    StateChangedError,
)
from .fencing import Fence
from .following import Follower
from .handle import SaveHandle, as_save_error
from .pausing import FailureLog, Pause
from .precision import parse_precision
from .progress import CallbackFailedError, LoadProgress, Reporter
from .replicated.sharing import Shared, SharedSaves
from .replicated.whole import parse_shared
from .staging import SharedMemory
from .state.fill import fill
from .state.flatten import FlatState, flatten
from .state.forecast import missing_bytes
from .state.garbage import uncollected
from .state.header import parse
from .state.layouts import Layouts
from .streaming import Streams
from .transport import Loaded, Patience, Staging, Transport

logger = logging.getLogger("fastcheck")

#: `load` keeps looking for a daemon that may just be starting for this long.
_LOAD_CONNECT_S = 3.0
#: Taking the rank's place goes through the registry, which may just be choosing a leader.
_SESSION_S = 5.0
_SESSION_AGAIN_S = 1.0
#: A load of a large state over a slow network; a daemon that hangs is noticed long before.
_LOAD_S = 3600.0
#: Of threads, and of steps in flight.
_COUNT_MAX = 1024


class Checkpointer:
    """Saves and loads one rank's state through the daemon on its node.

    Args:
        job: Name of the job, the same on every rank and after every restart.
        rank, world_size: From RANK and WORLD_SIZE unless given; 0 and 1 without those.
        address: `unix:///path` of this node's daemon, or `host:port` of one elsewhere.
        max_in_flight: Steps that may be under way before `save` waits; 0: the daemon's default.
        copy_threads: Threads that copy large states; by default up to four.
        timeout_s: Longest that `save` waits for room, and that `load` and `steps` wait for the registry.
        momentum: "exact", or what the optimizer's moments may be kept as: "index8" or "index4", codes of 8 or 4
            bits with one scale per block.
        weights: "exact", or "bounded(x)" with 0 < x <= 1: the largest error of a parameter, in standard
            deviations of what is coded at once.
        replicated: All ranks hold the same state, as under data parallelism: each saves a part of it, and a step on
            which they disagree is not committed. Loads take any number of ranks. See docs/replicated.md.
        per_rank: With `replicated`, keys whose tensors are each rank's own, such as ("rng",); "a.b" is
            `state["a"]["b"]`. Values that are no tensors always are.
        compare: With `replicated`, "all": each rank reads its whole state at every save and every difference is found;
            "pairs": its own part and one other's, in turn; "off".

    Making one needs no daemon: it is looked for at the first save or load. Use from one thread at a time;
    handles may be used from any. Optimizers in a state get a hook that notes what each step used; close()
    takes it off.

    Raises:
        InvalidNameError: the job's name is missing or not valid.
        InvalidArgumentError: another argument or an environment variable is not usable.
    """

    def __init__(
        self,
        job: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        address: str | None = None,
        *,
        max_in_flight: int = 0,
        copy_threads: int | None = None,
        timeout_s: float = 60.0,
        momentum: str = "exact",
        weights: str = "exact",
        replicated: bool = False,
        per_rank: Sequence[str] = (),
        compare: str = "all",
    ) -> None:
        self._identity = resolve(job, rank, world_size, address)
        where = parse_address(self._identity.address)
        self._max_in_flight = _at_least("max_in_flight", max_in_flight, 0)
        threads = (
            default_copy_threads() if copy_threads is None else _at_least("copy_threads", copy_threads, 1)
        )
        if not timeout_s > 0:
            raise InvalidArgumentError(f"timeout_s = {timeout_s!r} must be above 0")
        self._timeout_s = timeout_s
        self._layouts = Layouts(parse_precision(momentum, weights))
        self._shared = SharedSaves(self.rank, self.world_size, per_rank, compare) if replicated else None
        self._client_id = uuid.uuid4().hex
        self._daemon = Daemon(Connection(where))
        self._transport: Transport = (
            SharedMemory(self._daemon, threads) if where.local else Streams(self._daemon)
        )
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._session: int | None = None
        self._loaded_provisional = False
        self._loaded_own = True
        self._load_stats: dict[str, Any] = {}
        self._pause = Pause()
        self._failures = FailureLog()
        self._followers: list[Follower] = []
        self._fence = Fence()
        #: Tensors that were seen to change without a fence. Bounded by the names in the caller's states.
        self._restless: set[str] = set()

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._identity.job

    @property
    def rank(self) -> int:
        """This process' rank."""
        return self._identity.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self._identity.world_size

    @property
    def loaded_provisional(self) -> bool:
        """Whether the last `load` took a step that nobody could say is committed."""
        return self._loaded_provisional

    @property
    def loaded_own(self) -> bool:
        """Whether what is per rank in the last load was this rank's own; a rank that joined later has rank 0's."""
        return self._loaded_own

    @property
    def load_stats(self) -> Mapping[str, Any]:
        """How the last `load` that brought a step went; empty before.

        `step`; `bytes` of the state, of which `local_bytes` were in this node's memory and `fetched_bytes` came from
        `holders` other nodes; `bad_copies` that were bad or gone on the way; and the seconds `restore_s` (until the
        daemon had all of it, checked) and `total_s` (until the state was filled).
        """
        return MappingProxyType(dict(self._load_stats))

    def save(self, step: int, state: object, *, lazy: bool = False) -> SaveHandle:
        """Hand a copy of `state` to the daemon; returns when `state` may change again.

        With `lazy` it returns earlier, and what only an optimizer's step changes is copied while training goes on:
        parameters and state of the optimizer objects in `state`. Their steps wait for it by themselves; before
        anything else changes those tensors, call `fence()`. All else is copied before `save` returns, so without
        an optimizer object in `state`, with `replicated` or with a daemon on another host, `lazy` changes nothing. A
        change that did not wait fails the save with StateChangedError in the handle; only one behind torch's back
        (`.data`, raw memory, a replayed CUDA graph) goes unseen.

        Raises:
            UnsupportedStateError: something in `state` cannot be saved; the message names it.
            InvalidArgumentError: `step` is no step.
            ClosedError: after close().
        """
        self._check_open()
        number = _check_step(step)
        if not self._identity.enabled:
            handle = SaveHandle(number)
            handle._finish()
            return handle
        self._fence.settle()
        started = time.monotonic()
        whole: Shared | None = None
        with uncollected():
            if self._shared is None:
                lazy = bool(lazy) and self._transport.lazy
                flat = flatten(state, self._layouts, lazy=lazy, restless=self._restless)
            else:
                flat, whole = self._shared.flatten(state, self._layouts)
        handle = SaveHandle(number, flat.state_bytes)
        with self._lock:
            error = self._pause.error or self._attempt(lambda: self._begin(handle, flat, whole))
        if error is not None:
            handle._finish(as_save_error(error))
            self._ended(handle)
        handle._block(time.monotonic() - started)
        return handle

    def prepare(self, state: object) -> None:
        """Get memory ready for saves of states as large as this one; call it before training, the first save is as
        fast as others then.

        What optimizers will keep after their first step is estimated, for torch's own kinds. The memory is touched
        in the background. A daemon that cannot help costs the first save time and nothing else: it is only logged.

        Raises:
            UnsupportedStateError: something in `state` cannot be saved; the message names it.
            ClosedError: after close().
        """
        self._check_open()
        if not self._identity.enabled:
            return
        self._fence.settle()
        missing = missing_bytes(state)
        if self._shared is None:
            size = flatten(state, self._layouts).state_bytes
        else:
            size = self._shared.flatten(state, self._layouts)[0].state_bytes
            missing = -(-missing // self.world_size)
        if missing:  # a segment may be a quarter larger than the state, but not smaller
            size += missing + size // 64
        with self._lock:
            error = self._attempt(lambda: self._prepare(size))
        if error is not None:
            logger.info("the first save will not be prepared: %s", error)

    def _prepare(self, state_bytes: int) -> None:
        request = self._request(STEP_MAX, state_bytes)
        request.max_in_flight = _COUNT_MAX  # nothing is saved, so there is nothing to wait for
        self._transport.prepare(request, Patience(self._pause.connect_s, self._timeout_s))

    def fence(self) -> None:
        """Returns when the state of the last lazy save may change. Optimizers' steps do this by themselves.

        For loops that change parameters or optimizer state otherwise: averaging into them, clipping weights, steps
        that were compiled or captured into a CUDA graph.
        """
        self._fence.hold()

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
        session_s = min(_SESSION_AGAIN_S if self._pause.failing else _SESSION_S, self._timeout_s)
        return pb.BeginSaveRequest(
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            session=self._open_session(Patience(self._pause.connect_s, session_s)),
            step=step,
            state_bytes=state_bytes,
            max_in_flight=self._max_in_flight,
        )

    def _begin(self, handle: SaveHandle, flat: FlatState, whole: Shared | None) -> None:
        if self._shared is not None and whole is not None:
            handle._error_of = self._shared.errors_of(whole)
            flat = self._shared.compared(flat, whole, handle.step)
            whole.let_go()
        request = self._request(handle.step, flat.state_bytes)
        session = request.session
        staging = self._transport.begin(request, flat, Patience(self._pause.connect_s, self._timeout_s))
        if flat.watched:
            self._fence.begin(handle, staging, lambda: self._finish_lazily(handle, staging, session))
        else:
            self._finish(handle, staging, session)

    def _finish_lazily(self, handle: SaveHandle, staging: Staging, session: int) -> None:
        """In the background. Until this ends no other save or load begins: `settle` comes first."""
        error = self._attempt(lambda: self._finish(handle, staging, session))
        if error is not None:
            if isinstance(error, StateChangedError):
                self._restless.update(error.names)
            handle._finish(as_save_error(error))
            self._ended(handle)

    def _finish(self, handle: SaveHandle, staging: Staging, session: int) -> None:
        staged = staging.finish()
        handle._stage(staged.waited_s, staged.stage_s, staged.lazy_bytes)
        watch = pb.WatchSaveRequest(job=self.job, rank=self.rank, session=session, step=handle.step)
        self._followers = [f for f in self._followers if f.thread.is_alive()]
        self._followers.append(
            Follower(handle, self._daemon, watch, self._closing, self._ended, self._transport.warm)
        )

    def _ended(self, handle: SaveHandle) -> None:
        error = handle.exception()
        if error is not None and not self._closing.is_set():
            self._failures.note(handle.step, error)

    def load(
        self,
        state: object,
        step: int | None = None,
        *,
        allow_lossy: bool | None = None,
        allow_provisional: bool = False,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> int | None:
        """Fill `state` in place with a committed step and return its number; None when there is none.

        Without `step`, the newest one. All ranks get the same. Everything is checked before anything in
        `state` is touched. A step that was saved with a lossy coding is only loaded with `allow_lossy`; by
        default if this Checkpointer is lossy itself.

        With `allow_provisional`, a registry that does not answer is done without: the newest step that the nodes hold
        complete is taken, whether or not it was committed; `loaded_provisional` then says so. Of several ranks all
        must allow it: they agree on the step through torch.distributed, or `step` is given. What was loaded so can
        be saved again once the registry answers. While it does answer, the argument changes nothing.

        `progress` is called on this thread, a few times a second while bytes are brought to this node and once when
        all are here, before anything is filled; what it raises ends the load. Without it, a load that takes longer
        than a second shows a line on a terminal, and nothing elsewhere. `load_stats` tells afterwards how it went.

        Raises:
            LossyCheckpointError: the step is not exact, and exactness is asked for.
            StateMismatchError: state and checkpoint do not fit; names every difference.
            UnsupportedStateError: `state` holds something that cannot be filled.
            StepNotFoundError: the asked-for step is not kept.
            WorldSizeError: it was saved with another number of ranks.
            InvalidArgumentError: `step` is needed; the message names the complete ones.
            DaemonUnavailableError, RegistryUnavailableError, LoadFailedError, ...: it cannot be had now.
            ClosedError: after close().
        """
        self._check_open()
        wanted = None if step is None else _check_step(step)
        if not self._identity.enabled:
            return None
        lossy = self._layouts.precision is not None if allow_lossy is None else bool(allow_lossy)
        self._fence.settle()
        self._layouts.watch(state)
        with self._lock:
            self._loaded_provisional = False
            self._loaded_own = True
            if allow_provisional and wanted is None and self.world_size > 1:
                wanted = agree_on_step(self._loadable, self.rank, self.world_size)
                if wanted is None:
                    return None
            else:
                self._prepare_load(allow_provisional)
            request = pb.LoadRequest(
                job=self.job,
                rank=self.rank,
                world_size=self.world_size,
                step=wanted,
                allow_provisional=allow_provisional,
                follow=True,
            )
            return self._load(state, request, lossy, Reporter(progress))

    def _load(self, state: object, request: pb.LoadRequest, lossy: bool, reporter: Reporter) -> int | None:
        patience = Patience(CONNECT_S, _LOAD_S)
        started = time.monotonic()
        try:
            with self._transport.load(request, patience, allow_lossy=lossy, reporter=reporter) as loaded:
                if loaded is None:
                    return None
                number = _fill(state, loaded)
                self._note_loaded(loaded.ready, time.monotonic() - started)
                return number
        except SaveFailedError as error:
            # Codes about peers are the same in both directions.
            raise LoadFailedError(str(error)) from None
        except CallbackFailedError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        finally:
            reporter.close()

    def _prepare_load(self, allow_provisional: bool) -> None:
        """Find the daemon and take the rank's place; without a registry nobody can, and nobody else did."""
        self._find_daemon()
        try:
            self._open_session(Patience(CONNECT_S, self._timeout_s))
        except RegistryUnavailableError as error:
            if not allow_provisional:
                raise RegistryUnavailableError(
                    f"{error}. Without it, the newest step that the nodes hold complete can be loaded, committed or "
                    "not: load(state, allow_provisional=True)"
                ) from None

    def _loadable(self) -> tuple[list[int], bool]:
        """Steps that this rank could load now, and whether they were found without the registry."""
        self._prepare_load(allow_provisional=True)
        request = pb.ListStepsRequest(job=self.job, allow_provisional=True, world_size=self.world_size)
        found = self._daemon.list_steps(request, connect_s=CONNECT_S, timeout_s=self._timeout_s)
        return list(found.steps), found.provisional

    def _note_loaded(self, ready: pb.LoadReady, total_s: float) -> None:
        self._loaded_own = not ready.parts or ready.header_rank == self.rank
        if not self._loaded_own:
            logger.warning(
                "rank %d had no part in step %d of job %s: what is per rank in it is that of rank %d; give this rank "
                "its own seed and its own place in the data",
                self.rank,
                ready.step,
                self.job,
                ready.header_rank,
            )
        self._loaded_provisional = ready.provisional
        self._load_stats = {
            "step": ready.step,
            "bytes": ready.state_bytes,
            "local_bytes": ready.local_bytes,
            "fetched_bytes": ready.fetched_bytes,
            "holders": ready.holders,
            "bad_copies": ready.bad_copies,
            "restore_s": ready.restore_s,
            "total_s": total_s,
        }
        if ready.provisional:
            logger.warning(
                "step %d of job %s was loaded without the registry: it is complete and checked, but a newer step may "
                "have been committed",
                ready.step,
                self.job,
            )

    def steps(self) -> list[int]:
        """Committed steps that can be loaded, oldest first."""
        self._check_open()
        if not self._identity.enabled:
            return []
        self._find_daemon()
        request = pb.ListStepsRequest(job=self.job)
        found = self._daemon.list_steps(request, connect_s=CONNECT_S, timeout_s=self._timeout_s)
        return list(found.steps)

    def _find_daemon(self) -> None:
        """Give a daemon that is just starting a moment; raises DaemonUnavailableError after it."""
        until = time.monotonic() + min(_LOAD_CONNECT_S, self._timeout_s)
        while True:
            try:
                self._daemon.connect(CONNECT_S)
            except DaemonUnavailableError:
                if time.monotonic() >= until:
                    raise
                self._closing.wait(0.2)
            else:
                return

    def _open_session(self, patience: Patience) -> int:
        if self._session is None:
            request = pb.OpenSessionRequest(
                job=self.job, rank=self.rank, world_size=self.world_size, client_id=self._client_id
            )
            opened = self._daemon.open_session(
                request, connect_s=patience.connect_s, timeout_s=patience.timeout_s
            )
            self._session = opened.session
        return self._session

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("this Checkpointer is closed: make a new one")

    def close(self) -> None:
        """End threads, connections and mappings. Saves under way go on in the daemon, their handles end.

        A lazy save is handed over first.
        """
        if self._closing.is_set():
            return
        self._fence.close()
        self._closing.set()
        self._daemon.close()
        with self._lock:
            for follower in self._followers:
                follower.thread.join(timeout=2.0)
            self._followers.clear()
            self._transport.close()
            self._layouts.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpointer job {self.job!r}, rank {self.rank} of {self.world_size}>"


def _fill(state: object, loaded: Loaded) -> int:
    ready = loaded.ready
    header = loaded.state[ready.header_offset : ready.header_offset + ready.header_bytes]
    data = b"".join(contiguous_bytes(header, max(1, ready.header_bytes)))
    parsed = parse_shared(data, ready) if ready.parts else parse(data, ready.state_bytes)
    fill(state, parsed, loaded.state, loaded.pour)
    return ready.step


def _check_step(step: int) -> int:
    number = whole_number("step", step)
    if not 0 <= number <= STEP_MAX:
        raise InvalidArgumentError(f"step = {number} must be from 0 to {STEP_MAX}")
    return number


def _at_least(what: str, value: int, least: int) -> int:
    number = whole_number(what, value)
    if not least <= number <= _COUNT_MAX:
        raise InvalidArgumentError(f"{what} = {number} must be from {least} to {_COUNT_MAX}")
    return number
