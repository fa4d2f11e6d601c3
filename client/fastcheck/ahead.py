"""Mapping the segment of a load, and parsing its header, while the daemon still checks or fetches its bytes.

Having the kernel map its pages (MADV_POPULATE_READ) takes a good part of the time that the copy does, and needs none
of the bytes. Of those only the header is read before the daemon says that they are good, and what was parsed ahead is
used only if the header has the very same bytes then.
"""

from __future__ import annotations

import logging
import threading

import torch

from fastcheck_proto.v1 import state_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import CorruptError, FastCheckError
from .pages import populate
from .segments import Segment, map_file
from .state.header import parse

logger = logging.getLogger("fastcheck")

#: One call: a few dozen milliseconds, after which an end is noticed.
_SLICE_BYTES = 64 << 20


class MappedAhead:
    """The mapping of one load. Used by one thread."""

    def __init__(self) -> None:
        self._ref = pb.SegmentRef()
        self._segment: Segment | None = None
        self._stop = threading.Event()
        self._warming: threading.Thread | None = None
        #: A header's bytes, the size of its state, and what they say: good if they are read again later.
        self._parsed: tuple[bytes, int, state_pb2.StateHeader] | None = None

    def expect(self, news: pb.LoadSegment) -> None:
        """The bytes will probably be in this segment; an earlier guess is forgotten."""
        self.release()
        ref = news.segment
        try:
            segment = map_file(ref, private=True)
        except FastCheckError as error:
            # It may be gone already; if it is the one in the end, mapping it then tells what is wrong.
            logger.debug("not mapping a segment ahead: %s", error)
            return
        self._ref, self._segment, self._stop = ref, segment, threading.Event()
        self._warming = threading.Thread(
            target=_read_ahead,
            args=(segment.tensor, self._stop),
            name="fastcheck-ahead",
            daemon=True,
        )
        self._warming.start()
        if news.header_bytes:
            self._parse(news)

    def _parse(self, news: pb.LoadSegment) -> None:
        assert self._segment is not None
        data = self._segment.read(news.header_offset, news.header_bytes)
        try:
            self._parsed = data, news.state_bytes, parse(data, news.state_bytes)
        except CorruptError as error:
            # Nobody has checked these bytes yet. Bad ones are found by the daemon, others are parsed once more.
            logger.debug("not using a header that was read ahead: %s", error)

    def parse(self, data: bytes, state_bytes: int) -> state_pb2.StateHeader:
        """The header in bytes that were checked, as `state.header.parse` gives it, with what it raises."""
        if self._parsed is not None and self._parsed[:2] == (data, state_bytes):
            return self._parsed[2]
        return parse(data, state_bytes)

    def take(self, ref: pb.SegmentRef) -> Segment:
        """The mapping of the segment that the bytes are in, the one made ahead or a new one.

        The pages that are left go on being mapped beside the copy. Raises what `map_file` does.
        """
        if self._segment is None or self._ref.path != ref.path or self._segment.tensor.numel() < ref.bytes:
            self.release()
            self._ref, self._segment = ref, map_file(ref, private=True)
        return self._segment

    def release(self) -> bool:
        """Unmap; False if something still views the bytes, and has its own copy of them now."""
        self._stop.set()
        self._parsed = None
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        segment, self._segment = self._segment, None
        return segment is None or segment.release()


def _read_ahead(tensor: torch.Tensor, stop: threading.Event) -> None:
    start, size = tensor.data_ptr(), tensor.numel()
    for offset in range(0, size, _SLICE_BYTES):
        if stop.is_set() or not populate(start + offset, min(_SLICE_BYTES, size - offset), write=False):
            return
