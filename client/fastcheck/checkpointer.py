"""`Checkpointer`: what a training loop calls. Puts the SDK's parts together and decides what raises.

In `save`, only what the caller can and must fix raises: a state that cannot be saved, a bad step, use
after close. Whatever the daemon, its peers or the registry do is in the handle. `load` raises: a
trainer that cannot load must know before it trains.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

from fastcheck_proto.conventions import STEP_MAX

from .advice import Advice, Measured, advise, observed_mtbf
from .config import parse_precision, resolve, whole_number
from .connection import parse_address
from .copier import default_copy_threads
from .daemon import Daemon
from .errors import ClosedError, InvalidArgumentError
from .handle import SaveHandle
from .load import Loads
from .progress import LoadProgress
from .replicated.sharing import Shared, SharedSaves
from .save import COUNT_MAX, Saves
from .session import Session
from .shared_memory import SharedMemory
from .state.flatten import flatten, uncollected
from .state.layouts import Layouts
from .state.optimizers import missing_bytes
from .transport import Transport
from .upload import UploadTransport


class Checkpointer:
    """Saves and loads one rank's state through the daemon on its node.

    Args:
        job: Name of the job, the same on every rank and after every restart.
        rank, world_size: From RANK and WORLD_SIZE unless given; 0 and 1 without those.
        address: `unix:///path` of this node's daemon, or `host:port` of one elsewhere.
        max_in_flight: Steps that may be under way before `save` waits; 0: the daemon's default.
        copy_threads: Threads that copy large states; by default up to four.
        timeout_s: Longest that `save` waits for room, and that `load` and `steps` wait for the registry.
        ranks_timeout_s: Longest that `load` waits for other ranks to call it as well.
        precision: "exact", or what the codec may lose. "momentum8": the optimizer's moments become 8-bit codes with
            one scale per block. "compact": they become 4-bit codes, and each parameter stays within a thousandth of
            a standard deviation of what is coded at once.
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
        ranks_timeout_s: float = 300.0,
        precision: str = "exact",
        replicated: bool = False,
        per_rank: Sequence[str] = (),
        compare: str = "all",
    ) -> None:
        self._identity = resolve(job, rank, world_size, address)
        where = parse_address(self._identity.address)
        in_flight = _at_least("max_in_flight", max_in_flight, 0)
        threads = (
            default_copy_threads() if copy_threads is None else _at_least("copy_threads", copy_threads, 1)
        )
        for what, seconds in (("timeout_s", timeout_s), ("ranks_timeout_s", ranks_timeout_s)):
            if not seconds > 0:
                raise InvalidArgumentError(f"{what} = {seconds!r} must be above 0")
        self._layouts = Layouts(parse_precision(precision))
        self._shared = SharedSaves(self.rank, self.world_size, per_rank, compare) if replicated else None
        self._daemon = Daemon(where)
        self._session = session = Session(self._identity, self._daemon, timeout_s, in_flight)
        self._transport: Transport = (
            SharedMemory(session, threads) if where.local else UploadTransport(session)
        )
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._saves = Saves(session, self._transport, self._shared)
        self._loads = Loads(session, self._transport, ranks_timeout_s)
        self._measured = Measured()
        # One that nobody closes keeps no threads.
        weakref.finalize(self, session.cut).atexit = False

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
        return self._loads.loaded_provisional

    @property
    def loaded_own(self) -> bool:
        """Whether what is per rank in the last load was this rank's own; a rank that joined later has rank 0's."""
        return self._loads.loaded_own

    @property
    def load_stats(self) -> Mapping[str, Any]:
        """How the last `load` that brought a step went; empty before.

        `step`, and `saved_by` how many ranks; `bytes` of the state, of which `local_bytes` were in this node's memory
        and `fetched_bytes` came from `holders` other nodes; `bad_copies` that were bad or gone on the way; and the
        seconds `restore_s` (until the daemon had all of it, checked) and `total_s` (until the state was filled).
        """
        return MappingProxyType(dict(self._loads.stats))

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
        return self._save(step, state, lazy=lazy)

    def _save(
        self, step: int, state: object, *, lazy: bool = False, like: dict[Any, Any] | None = None
    ) -> SaveHandle:
        """As `save`; `like` is for integrations that take a state apart, see `state.layouts.Layouts.arrange`."""
        self._check_open()
        number = _check_step(step)
        if not self._identity.enabled:
            handle = SaveHandle(number)
            handle._finish()
            return handle
        self._saves.fence.settle()
        started = time.monotonic()
        whole: Shared | None = None
        with uncollected():
            if self._shared is None:
                lazy = bool(lazy) and self._transport.lazy
                restless = self._saves.restless
                flat = flatten(state, self._layouts, lazy=lazy, restless=restless, like=like)
            else:
                flat, whole = self._shared.flatten(state, self._layouts)
        handle = SaveHandle(number, flat.state_bytes)
        with self._lock:
            self._saves.begin(handle, flat, whole)
        handle._block(time.monotonic() - started)
        self._measured.note(handle)
        return handle

    def prepare(self, state: object) -> None:
        """Have memory set aside for saves of states as large as this one; call it before training, the first save is as
        fast as others then. Without it, the first save does so.

        What optimizers will keep after their first step is estimated, for torch's own kinds. Returns when the memory is
        there and its pages are touched, or cannot be had. A daemon that is not there costs the first save time and
        nothing else: it is only logged.

        Raises:
            OutOfMemoryError: this job's saves do not fit into this node's memory; the message has the numbers.
            UnsupportedStateError: something in `state` cannot be saved; the message names it.
            ClosedError: after close().
        """
        self._check_open()
        if not self._identity.enabled:
            return
        self._saves.fence.settle()
        missing = missing_bytes(state)
        if self._shared is None:
            flat = flatten(state, self._layouts)
        else:
            flat = self._shared.flatten(state, self._layouts)[0]
            missing = -(-missing // self.world_size)
        size = flat.state_bytes
        if missing:  # a segment may be larger than the state, but not smaller
            size += missing + size // 64
        with self._lock:
            self._saves.prepare(flat, size)

    def fence(self) -> None:
        """Returns when the state of the last lazy save may change. Optimizers' steps do this by themselves.

        For loops that change parameters or optimizer state otherwise: averaging into them, clipping weights, steps
        that were compiled or captured into a CUDA graph.
        """
        self._saves.fence.hold()

    def load(
        self,
        state: object,
        step: int | None = None,
        *,
        allow_lossy: bool | None = None,
        allow_provisional: bool = False,
        together: bool = True,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> int | None:
        """Fill `state` in place with a committed step and return its number; None when there is none.

        Without `step`, the newest one, and all ranks get the same. What any rank has begun to save by then and is not
        committed is void, if this process takes the place of an earlier one, or is one of several ranks and has
        saved: to keep it, wait for its handles, or name the step. Everything is checked before anything in
        `state` is touched. Where torch.distributed joins the ranks of the job, all of them have to call this: they
        agree on the step, and fill their states only when each of them has all of it and has checked it; else every
        one raises. With `together=False` a rank loads for itself alone.

        DTensors may be cut otherwise than when the step was saved: by another number of ranks, over another mesh,
        with other placements; what is no DTensor is then this rank's own, or rank 0's if it had no part in the
        step (`loaded_own`). See docs/resharding.md.

        A step that was saved with a lossy coding is only loaded with `allow_lossy`; by
        default if this Checkpointer is lossy itself.

        With `allow_provisional`, a registry that does not answer is done without: the newest step that the nodes hold
        complete is taken, whether or not it was committed; `loaded_provisional` then says so. Of several ranks all
        must allow it: they agree on the step through torch.distributed, or `step` is given. What was loaded so can
        be saved again once the registry answers. While it does answer, the argument changes nothing.

        `progress` is called on this thread, a few times a second while bytes are brought to this node and once when
        all are here, before anything is filled; what it raises ends the load. Of a step that as many ranks saved over
        another mesh it begins anew once that is found out. Without it, a load that takes longer
        than a second shows a line on a terminal, and nothing elsewhere. `load_stats` tells afterwards how it went.

        Raises:
            LossyCheckpointError: the step is not exact, and exactness is asked for.
            StateMismatchError: state and checkpoint do not fit; names every difference.
            UnsupportedStateError: `state` holds something that cannot be filled.
            StepNotFoundError: the asked-for step is not kept.
            WorldSizeError: it was saved with another number of ranks, and has no DTensors.
            InvalidArgumentError: `step` is needed; the message names the complete ones.
            DaemonUnavailableError, RegistryUnavailableError, LoadFailedError, ...: it cannot be had now.
            ClosedError: after close().
        """
        self._check_open()
        wanted = None if step is None else _check_step(step)
        if not self._identity.enabled:
            return None
        lossy = self._layouts.precision is not None if allow_lossy is None else bool(allow_lossy)
        self._saves.fence.settle()
        self._layouts.watch(state)
        with self._lock:
            return self._loads.load(
                state,
                wanted,
                lossy=lossy,
                provisional=allow_provisional,
                together=together,
                progress=progress,
            )

    def steps(self) -> list[int]:
        """Committed steps that can be loaded, oldest first."""
        self._check_open()
        if not self._identity.enabled:
            return []
        return self._loads.steps()

    def advise(
        self, *, mtbf_s: float | None = None, restore_s: float | None = None, step_s: float | None = None
    ) -> Advice | None:
        """How often to save, from what this rank's last saves cost; `str()` of it says why.

        Args:
            mtbf_s: mean time between failures of the whole job, in seconds. By default what the registry remembers
                of nodes that went DOWN; where none did, no more is assumed than the time it remembers.
            restore_s: from a failure until training goes on; by default what the last `load` took.
            step_s: a training step without a save; by default the time between saves.

        Returns:
            None as long as nothing is known: no save is committed yet, or FastCheck is turned off.

        Raises:
            InvalidArgumentError: a figure is not usable.
            DaemonUnavailableError, RegistryUnavailableError: nobody tells how often nodes failed; give `mtbf_s`.
            ClosedError: after close().
        """
        self._check_open()
        costs = self._measured.costs(step_s)
        if not self._identity.enabled or costs is None:
            return None
        source = "given"
        if mtbf_s is None:
            from .admin import AdminClient  # noqa: PLC0415  a trainer seldom asks

            with AdminClient(self._identity.address) as admin:
                mtbf_s, source = observed_mtbf(admin.history()["transitions"], time.time())
        if restore_s is None:
            restore_s = float(self._loads.stats.get("total_s", 0.0))
        return advise(
            step_s=costs.step_s,
            stall_s=costs.stall_s,
            commit_s=costs.commit_s,
            busy_s=costs.busy_s,
            restore_s=restore_s,
            mtbf_s=mtbf_s,
            mtbf_source=source,
        )

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("this Checkpointer is closed: make a new one")

    def close(self) -> None:
        """End threads, connections and mappings. Saves under way go on in the daemon, their handles end.

        A lazy save is handed over first. The registry is told that this rank is done, if it answers within two seconds:
        then the job's steps may be deleted.
        """
        if self._closing.is_set():
            return
        self._saves.fence.close()
        self._closing.set()
        self._session.close()
        self._daemon.close()
        self._transport.interrupt()  # a `prepare` under way has the lock until its pages are there
        with self._lock:
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


def _check_step(step: int) -> int:
    number = whole_number("step", step)
    if not 0 <= number <= STEP_MAX:
        raise InvalidArgumentError(f"step = {number} must be from 0 to {STEP_MAX}")
    return number


def _at_least(what: str, value: int, least: int) -> int:
    number = whole_number(what, value)
    if not least <= number <= COUNT_MAX:
        raise InvalidArgumentError(f"{what} = {number} must be from {least} to {COUNT_MAX}")
    return number
