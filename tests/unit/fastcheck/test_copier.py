"""Copies by address: every byte arrives, whatever pieces it is cut into."""

from __future__ import annotations

import pytest
import torch

from fastcheck import copier as copier_module
from fastcheck.copier import Copier


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
