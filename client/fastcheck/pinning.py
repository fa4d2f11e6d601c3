"""Which segments are page-locked, so that a GPU can write into them while the host does something else.

Locking is slow and touches every page, so it is done once per mapping and undone when that is let go. A
machine that refuses is not asked again and again: the copies are right without it, only slower.
"""

from __future__ import annotations

import logging
import threading
import weakref

from .gpu import Gpu
from .segments import Segment

logger = logging.getLogger("fastcheck")

#: After so many refusals in a row nothing more is tried.
_REFUSALS_MAX = 3


class Pinner:
    """Page-locks segments. Safe to use from several threads."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._pinned: weakref.WeakSet[Segment] = weakref.WeakSet()
        #: Segments that could not be locked.
        self.refusals = 0
        self._refusals_in_a_row = 0
        #: Set by the first segment that a GPU copies into: from then on others are locked ahead too.
        self.wanted = False

    def pin(self, segment: Segment) -> bool:
        """Lock a segment's pages for as long as it is mapped; returns whether they are."""
        self.wanted = True
        with self._lock:
            if segment in self._pinned:
                return True
            if self._refusals_in_a_row >= _REFUSALS_MAX or not segment.tensor.numel():
                return False
            address = segment.tensor.data_ptr()
            try:
                reason = self._gpu.lock(address, segment.tensor.numel())
            except Exception as error:  # noqa: BLE001  whatever the driver throws, the copy goes on without
                reason = repr(error)
            if reason:
                self._refuse(reason)
                return False
            self._refusals_in_a_row = 0
            self._pinned.add(segment)
            # The segment goes before its mapping does. At the end of the process the driver cleans up itself.
            weakref.finalize(segment, self._gpu.unlock, address).atexit = False
            return True

    def pin_ahead(self, segment: Segment) -> None:
        """Lock the pages of a segment that a later save will get, if a GPU copies into them at all."""
        if self.wanted:
            self.pin(segment)

    def _refuse(self, reason: str) -> None:
        self.refusals += 1
        self._refusals_in_a_row += 1
        logger.log(
            logging.WARNING if self.refusals == 1 else logging.DEBUG,
            "cannot page-lock a segment, so copies from the GPU are slower and hold a save up (%s; logged once): "
            "raise the container's memory limits if it has any",
            reason,
        )
