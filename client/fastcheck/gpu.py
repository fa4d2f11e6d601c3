"""All that FastCheck does with CUDA: page-locking a segment, and copies on streams of their own. Decides nothing.

A test's stand-in has the methods of `Cuda`. Sources are kept alive by the caller until
`wait` has returned, which is also what keeps torch's allocator from handing their memory out again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .segments import MappedSegment

logger = logging.getLogger("fastcheck")

#: A place in a segment, and the tensor whose bits go there.
Pair = tuple[torch.Tensor, torch.Tensor]
#: After so many refusals in a row no more segments are page-locked.
_REFUSALS_MAX = 3
#: Events by device: a point in the work of some streams.
Mark = dict[torch.device, Any]


class Cuda:
    """CUDA through torch. Makes streams when it is first used, so that a program without a GPU never notices."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a CUDA device."""
        return tensor.is_cuda

    def mark(self, tensors: Iterable[torch.Tensor]) -> Mark:
        """Events on the current streams."""
        return {
            device: torch.cuda.current_stream(device).record_event()
            for device in dict.fromkeys(tensor.device for tensor in tensors)
        }

    def copy(self, pairs: Sequence[Pair], after: Mark) -> Mark:
        """Copies on one side stream per device."""
        done: Mark = {}
        try:
            for device, event in after.items():
                stream = self._stream(device)
                stream.wait_event(event)
                with torch.cuda.stream(stream), torch.no_grad():
                    for into, source in pairs:
                        if source.device == device:
                            into.copy_(source, non_blocking=True)
                done[device] = stream.record_event()
        except BaseException:
            # What was given to a device goes on writing: nobody may think that the segment is free.
            for device in after:
                self._stream(device).synchronize()
            raise
        return done

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def hold(self, until: Mark) -> None:
        """The current streams wait."""
        for device, event in until.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, until: Mark) -> None:
        """The host waits."""
        for event in until.values():
            event.synchronize()

    def lock(self, address: int, size_bytes: int) -> str:
        """cudaHostRegister, for all devices."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(address, size_bytes, 1)  # 1: cudaHostRegisterPortable
        return "" if int(error) == 0 else f"cudaHostRegister answered {int(error)}"

    def unlock(self, address: int) -> None:
        """cudaHostUnregister."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class Pinner:
    """Page-locks segments, so that a GPU can write into them while the host does something else.

    Locking is slow and touches every page, so it is done once per mapping and undone when that is let go. A machine
    that refuses is not asked again and again: the copies are right without it, only slower. Safe to use from several
    threads.
    """

    def __init__(self, gpu: Cuda) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._pinned: weakref.WeakSet[MappedSegment] = weakref.WeakSet()
        #: Segments that could not be locked.
        self.refusals = 0
        self._refusals_in_a_row = 0
        #: Set by the first segment that a GPU copies into: from then on others are locked ahead too.
        self.wanted = False

    def pin(self, segment: MappedSegment) -> bool:
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

    def pin_ahead(self, segment: MappedSegment) -> None:
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
