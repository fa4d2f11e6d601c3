"""Lazy saves: the part of a copy that goes on while training does, and the promise that it is never torn.

The bytes are right if nothing changed them between `save` and their copy. Whoever is about to change them calls
`hold`: it helps with what is left and returns when nothing more is read by the host; a GPU is told to wait by itself.
Whether somebody changed them without asking is judged once, by torch's counts of changes: when training first
holds, else when the copy has ended. Only what passed is sealed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .copier import Copier, carried
from .errors import StateChangedError
from .gpu import Cuda, Mark
from .handle import SaveHandle
from .segments import MappedSegment
from .state.flatten import FlatState
from .transport import Staging

logger = logging.getLogger("fastcheck")

_NAMES_SHOWN_MAX = 5


class LazyCopy:
    """The later pieces of one state on their way into a segment. `run` it in one thread, `hold` it from any."""

    def __init__(self, flat: FlatState, segment: MappedSegment, copier: Copier, gpu: Cuda) -> None:
        later = [piece for piece in flat.pieces if piece.later]
        near = [piece for piece in later if not gpu.takes(piece.tensor)]
        # Both lists keep the memory alive that is read, whatever becomes of the caller's tensors.
        self._kept = near
        self._far = [piece for piece in later if gpu.takes(piece.tensor)]
        self._watched = flat.watched
        self._into = segment.tensor
        self._copier = copier
        self._gpu = gpu
        self.near_bytes = sum(piece.bytes for piece in near)
        self.bytes = self.near_bytes + sum(piece.bytes for piece in self._far)
        self._moves = copier.begin(near, segment.tensor, warm=segment.warm)
        self._after: Mark = gpu.mark(piece.tensor for piece in self._far) if self._far else {}
        self._until: Mark = {}
        #: The device has all copies, or will get none.
        self._given = threading.Event()
        self._judging = threading.Lock()
        self._changed: list[str] | None = None
        self.seconds = 0.0

    def run(self) -> None:
        """Copy everything; returns when the bytes are there.

        Raises:
            StateChangedError: something changed the state without holding first; the bytes are of no use.
        """
        started = time.monotonic()
        try:
            try:
                if self._far:
                    pairs = [carried(piece, self._into) for piece in self._far]
                    self._until = self._gpu.copy(pairs, self._after)
            finally:
                self._given.set()
            self._moves.work()
            self._moves.join()
            self._gpu.wait(self._until)
            self._moves.join()  # a fence may have been broken off meanwhile
            changed = self._judge()
        finally:
            # After an error the segment is given back: then nobody may write to it any more.
            self._moves.cancel()
            self._moves.quiet()
            self._gpu.wait(self._until)
            self.seconds = time.monotonic() - started
            self._kept, self._far = [], []
            self._into = torch.empty(0, dtype=torch.uint8)
        if changed:
            shown = ", ".join(changed[:_NAMES_SHOWN_MAX]) + (", ..." if changed[_NAMES_SHOWN_MAX:] else "")
            raise StateChangedError(
                f"the state changed while a lazy save was copying it, other than by an optimizer's step ({shown}): "
                "call fence() of the Checkpointer before such a change; from now on save copies these itself",
                changed,
            )

    def hold(self) -> None:
        """Returns when the state may change: what is left is copied first, on a device at the latest before that."""
        self._judge()
        try:
            self._copier.help(self._moves, self.near_bytes)
            self._moves.work()
            self._moves.quiet()
            self._given.wait()
            self._gpu.hold(self._until)
        except BaseException as error:
            # Broken off, by Ctrl-C perhaps: what was judged already may change any time now.
            self._moves.spoil(error)
            raise

    def _judge(self) -> list[str]:
        """Names of what changed, found out once: after the first `hold` training may change everything."""
        with self._judging:
            if self._changed is None:
                self._changed = [watched.name for watched in self._watched if watched.changed]
                self._watched = ()
            return self._changed


class Fence:
    """The one lazy save of a Checkpointer that may be under way, and the thread that finishes it.

    Training waits for it before an optimizer's step, or where the loop says so. The hook is torch's for the steps of
    all optimizers of the process, since an optimizer that is not in the state may own the same parameters. Nothing
    here raises into a step.
    """

    def __init__(self) -> None:
        self._copy: Staging | None = None
        self._handle: SaveHandle | None = None
        self._finishing: Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._hook: RemovableHandle | None = None
        self._process = os.getpid()

    def begin(self, handle: SaveHandle, copy: Staging, finish: Callable[[], None]) -> None:
        """Let `finish` run in the background and hold training back from what `copy` still reads.

        Call `settle` before.
        """
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(_before_step(weakref.ref(self)))
            weakref.finalize(self, self._hook.remove).atexit = False
        if self._pool is None or self._process != os.getpid():
            # Not a daemon thread: a program that ends still gets its last save sealed.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="fastcheck-lazy")
        self._process = os.getpid()
        self._finishing = self._pool.submit(finish)
        self._handle, self._copy = handle, copy

    def hold(self) -> None:
        """Returns when the state may change."""
        copy, handle = self._copy, self._handle
        if copy is None or handle is None or self._process != os.getpid():
            return  # a child process has its own memory, and nobody who would finish the copy
        started = time.monotonic()
        try:
            copy.hold()
        finally:
            handle._block(time.monotonic() - started)
        if self._copy is copy:
            self._copy = None

    def settle(self) -> None:
        """Returns when the lazy save is sealed or has failed: until then its rank may begin no other."""
        self.hold()
        finishing, handle = self._finishing, self._handle
        if finishing is None or handle is None or self._process != os.getpid():
            return
        started = time.monotonic()
        finishing.result()
        handle._block(time.monotonic() - started)
        self._finishing = self._handle = None

    def close(self) -> None:
        """Settle, end the thread, take the hook off."""
        self.settle()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _before_step(fence: weakref.ref[Fence]) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    def hold(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a compiled step runs without us; the copy finds out what it changed
        found = fence()
        if found is None:
            return
        try:
            found.hold()
        except Exception:
            # G4. The copy goes on and is judged at its end: what this step changes makes it fail, not torn.
            logger.exception("defect in FastCheck: cannot hold a step back")

    return hold
