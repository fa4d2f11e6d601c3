"""A state ready to be copied: its tensors with their places, its header, its layout. Copies nothing itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fastcheck_proto.conventions import HEADER_BYTES_MAX
from fastcheck_proto.v1 import common_pb2, layout_pb2

from ..errors import UnsupportedStateError
from .collect import Collected
from .layout import Arrangement, add_header, header_padding
from .layouts import Layouts
from .optimizers import Watched, steady_slots


class Piece(NamedTuple):
    """A plain tensor and the byte range that its contiguous bytes take in the rank state.

    `later`: it may be copied until the next step of an optimizer, for nothing else changes it.
    """

    tensor: torch.Tensor
    offset: int
    bytes: int
    later: bool = False


@dataclass(frozen=True)
class FlatState:
    """A state ready to be copied: `pieces` by offset, the header, zeros between and after. Sizes in bytes.

    `watched` are the tensors of the pieces that may be copied later.
    """

    pieces: tuple[Piece, ...]
    header: bytes
    header_offset: int
    layout: layout_pb2.StateLayout
    watched: tuple[Watched, ...] = ()
    #: Which part of a state that all ranks hold alike this is, and what was found in that; None: a state of its own.
    shared: common_pb2.SharedPart | None = None
    shared_digests: tuple[common_pb2.PartDigest, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Tensors, header and padding together."""
        return self.header_offset + len(self.header) + header_padding(len(self.header))


def flatten(
    state: object,
    layouts: Layouts | None = None,
    *,
    lazy: bool = False,
    restless: Container[str] = (),
    like: dict[Any, Any] | None = None,
) -> FlatState:
    """Lay the state out; with `layouts`, as before if its structure is known there.

    The layout message belongs to `layouts` and is only good until the next state is laid out with it. With
    `lazy`, pieces that only an optimizer's step changes are marked, except those of tensors named in `restless`.
    `like` has the state's tensors in the structure that they were taken from, see `Layouts.arrange`.

    Raises:
        UnsupportedStateError: something in the state cannot be saved; the message names its path.
    """
    layouts = layouts or Layouts()
    found = layouts.collect(state)
    arrangement = layouts.arrange(found, like=like)
    if found.placed_by is not arrangement:
        _place(found, arrangement)
    header = header_of(found, arrangement.layout)
    steady = steady_slots(found, restless) if lazy else {}
    pieces = pieces_of(found, arrangement, steady)
    layouts.keep(found)
    return FlatState(pieces, header, arrangement.end, arrangement.layout, tuple(steady.values()))


def _place(found: Collected, arrangement: Arrangement) -> None:
    for record, slot in zip(found.header.tensors, found.record_slots, strict=True):
        place = arrangement.places[slot]
        record.offset = place.offset
        record.piece_bytes = place.piece_bytes
        record.piece_offsets[:] = place.piece_offsets
    found.placed_by = arrangement


def header_of(found: Collected, layout: layout_pb2.StateLayout) -> bytes:
    """The header, whose places are set; its chunks are appended to the layout.

    Raises:
        UnsupportedStateError: it is too large.
    """
    header: bytes = found.header.SerializeToString()
    if len(header) > HEADER_BYTES_MAX:
        raise UnsupportedStateError(
            f"the state's structure and plain values take {len(header)} bytes, more than {HEADER_BYTES_MAX}: "
            "put large bytes and long lists into tensors"
        )
    add_header(layout, len(header) + header_padding(len(header)))
    return header


def pieces_of(found: Collected, arrangement: Arrangement, steady: Container[int] = ()) -> tuple[Piece, ...]:
    """The tensors' pieces, by offset; those of `steady` slots may be copied later."""
    cut: dict[int, tuple[torch.Tensor, ...]] = {}
    for slot, elements in arrangement.piece_elements.items():
        tensor = found.tensors[slot]
        if tensor.is_contiguous():
            cut[slot] = torch.split(tensor.view(-1), elements)
        else:  # its pieces are whole rows
            cut[slot] = torch.split(tensor, elements // found.extents[slot].row)
    tensors = found.tensors
    # What `Piece` does, without a call of Python's own for each.
    make: Callable[[Iterable[object]], Piece] = partial(tuple.__new__, Piece)
    return tuple(
        map(
            make,
            [
                (cut[slot][number] if slot in cut else tensors[slot], offset, size, slot in steady)
                for slot, number, offset, size in arrangement.parts
            ],
        )
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns Python's garbage collector off inside, if it was on. It is off for all threads.

    Ten thousand tensors make it run eighty times, once through everything in the process, which takes several times
    the walk itself. None of what the walk makes is garbage before its end.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
