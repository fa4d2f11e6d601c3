"""A rank state in plain memory, as a daemon would hold it: what the tests save to and fill from."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from fastcheck.copier import Copier
from fastcheck.segments import MappedSegment, anonymous
from fastcheck.state.fill import fill
from fastcheck.state.flatten import flatten
from fastcheck.state.header import parse
from fastcheck.state.tensors import carrier


@dataclass
class Snapshot:
    segment: MappedSegment
    header: bytes
    state_bytes: int

    def fill(self, state: Any) -> None:
        fill(state, parse(self.header, self.state_bytes), self.segment.tensor[: self.state_bytes])

    def scribble(self) -> None:
        """What the daemon does once the load is over: use the memory for something else."""
        self.segment.tensor.fill_(0xA5)


def snapshot(state: Any) -> Snapshot:
    flat = flatten(state)
    segment = anonymous(flat.state_bytes)
    segment.tensor.fill_(0x5A)
    Copier(2).copy(flat, segment.tensor)
    tail = bytes(segment.tensor[flat.header_offset : flat.state_bytes].tolist())
    header, padding = tail[: len(flat.header)], tail[len(flat.header) :]
    assert header == flat.header
    assert not any(padding)
    return Snapshot(segment, header, flat.state_bytes)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's contiguous bytes."""
    plain = carrier(tensor.detach().resolve_conj().resolve_neg()).contiguous()
    if not plain.numel():
        return b""
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def same(one: Any, other: Any) -> bool:
    """Equal in structure, types and bits; for trees without objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return one == other
