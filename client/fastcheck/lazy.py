"""The part of a save's copy that goes on while training does, and the promise that it is never torn.

The bytes are right if nothing changed them between `save` and their copy. Whoever is about to change them calls
`hold`: it helps with what is left and returns when nothing more is read by the host; a GPU is told to wait by itself.
Whether somebody changed them without asking is judged once, by torch's counts of changes: when training first
holds, else when the copy has ended. Only what passed is sealed.
"""

from __future__ import annotations

import threading
import time

import torch

from .copying import Copier, carried
from .errors import StateChangedError
from .gpu import Gpu, Mark
from .segments import Segment
from .state.flatten import FlatState

_NAMES_SHOWN_MAX = 5


class LazyCopy:
    """The later pieces of one state on their way into a segment. `run` it in one thread, `hold` it from any."""

    def __init__(self, flat: FlatState, segment: Segment, copier: Copier, gpu: Gpu) -> None:
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
