"""What lies between the pieces of a state is zero, whatever was there, also where another state was copied before."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck.copier import ZeroedGaps
from fastcheck.state.flatten import FlatState, Piece
from fastcheck_proto.v1 import layout_pb2

#: Bytes of each tensor, and lines of 64 left free before it.
STATES = st.lists(st.tuples(st.integers(1, 300), st.sampled_from([0, 0, 0, 1, 5])), max_size=8)


def state(sizes: list[tuple[int, int]]) -> FlatState:
    pieces, at = [], 0
    for size, free in sizes:
        at = -(-at // 64) * 64 + 64 * free
        pieces.append(Piece(torch.full((size,), 7, dtype=torch.uint8), at, size))
        at += size
    return FlatState(tuple(pieces), b"header", -(-at // 64) * 64, layout_pb2.StateLayout())


@settings(max_examples=200, deadline=None)
@given(st.lists(STATES, min_size=1, max_size=4), st.integers(0, 63))
def test_gaps_are_zero_and_nothing_after_the_header_begins_is_touched(states, more):
    gaps = ZeroedGaps()
    for sizes in states:
        flat = state(sizes)
        for _ in range(2):
            segment = torch.full((flat.state_bytes + more,), 255, dtype=torch.uint8)
            gaps.zero(flat, segment)
            for piece in flat.pieces:
                segment[piece.offset : piece.offset + piece.bytes] = piece.tensor
            expected = torch.zeros(flat.header_offset, dtype=torch.uint8)
            for piece in flat.pieces:
                expected[piece.offset : piece.offset + piece.bytes] = 7
            assert segment[: flat.header_offset].equal(expected)
            assert (segment[flat.header_offset :] == 255).all()
