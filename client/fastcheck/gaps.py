"""Zeros between the pieces of a state: what an earlier one left in a segment is no part of this one."""

from __future__ import annotations

import torch

from fastcheck_proto.conventions import TENSOR_ALIGNMENT_BYTES

from .state.flatten import FlatState

#: Pieces begin at multiples of this, so a gap is a part of one line as a rule.
_LINE_BYTES = TENSOR_ALIGNMENT_BYTES


class ZeroedGaps:
    """Knows the gaps of the state that it met last: ten thousand tensors have as many, at every save the same."""

    def __init__(self) -> None:
        #: Where pieces begin, their sizes, and where the header begins; the lines with gaps of such a state.
        self._places: tuple[list[int], list[int], int] | None = None
        self._lines = torch.empty(0, dtype=torch.int64)

    def zero(self, flat: FlatState, segment: torch.Tensor) -> None:
        """Zero the lines that have gaps, all in one call, before any piece is copied over the rest of them.

        `segment` is flat uint8, at least state_bytes long.
        """
        pieces = flat.pieces
        places = [piece.offset for piece in pieces], [piece.bytes for piece in pieces], flat.header_offset
        if places != self._places:
            self._lines = torch.tensor(_lines_with_gaps(*places), dtype=torch.int64)
            self._places = places
        if len(self._lines):
            lines = segment[: len(segment) // _LINE_BYTES * _LINE_BYTES].view(-1, _LINE_BYTES)
            lines.index_fill_(0, self._lines, 0)


def _lines_with_gaps(offsets: list[int], sizes: list[int], header_offset: int) -> list[int]:
    lines: list[int] = []
    end = 0
    for offset, size in (*zip(offsets, sizes, strict=True), (header_offset, 0)):
        if offset > end:
            lines += range(end // _LINE_BYTES, -(-offset // _LINE_BYTES))
        end = offset + size
    return lines
