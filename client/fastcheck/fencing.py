"""Where training waits for a lazy save: before an optimizer's step, or where the loop says so.

The hook is torch's for the steps of all optimizers of the process, since an optimizer that is not in the state may own
the same parameters. Nothing here raises into a step.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .handle import SaveHandle

logger = logging.getLogger("fastcheck")


class Held(Protocol):
    """A copy that goes on in the background."""

    def hold(self) -> None:
        """Returns when what is copied may change."""
        ...


class Fence:
    """The one lazy save of a Checkpointer that may be under way, and the thread that finishes it."""

    def __init__(self) -> None:
        self._copy: Held | None = None
        self._handle: SaveHandle | None = None
        self._finishing: Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._hook: RemovableHandle | None = None
        self._process = os.getpid()

    def begin(self, handle: SaveHandle, copy: Held, finish: Callable[[], None]) -> None:
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
