"""Copies by address: every byte arrives, whatever pieces it is cut into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck import copier as copier_module
from fastcheck.copier import Copier, ZeroedGaps
from fastcheck.state.flatten import FlatState, Piece
from fastcheck_proto.v1 import layout_pb2


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_poured_arrives_whole_and_nothing_else_is_touched(monkeypatch, threads):
    monkeypatch.setattr(copier_module, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(copier_module, "_PARALLEL_BYTES_MIN", 1)
    pieces: list[int] = []

    def move(into: int, source: int, size: int) -> None:
        pieces.append(size)
        real(into, source, size)

    real = copier_module.move_bytes
    monkeypatch.setattr(copier_module, "move_bytes", move)
    sizes = [1, 999, 1000, 1999, 2001, 12_345]
    source = torch.randint(0, 255, (sum(sizes),), dtype=torch.uint8)
    target = torch.zeros(sum(sizes) + 10, dtype=torch.uint8)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    copier = Copier(threads)
    copier.pour(
        [
            (target.data_ptr() + start, source.data_ptr() + start, size)
            for start, size in zip(starts, sizes, strict=True)
        ]
    )
    copier.close()
    assert target[:-10].equal(source)
    assert not target[-10:].any()
    assert sum(pieces) == sum(sizes)
    assert all(size < 2000 for size in pieces)
    assert sum(size < 1000 for size in pieces) == 2, "only what is smaller as a whole"


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
