"""How tensors are cut over ranks: boxes, which saved ones make up a wanted one, and DTensors' own layouts.

A **box** is what a rank has of a tensor: its offsets in the whole tensor, and its sizes. Several ranks may hold the
same box (replicas). The boxes of one tensor do not overlap otherwise, but nothing here needs that.

Of a DTensor the rank's local part is saved, with a record of how it was cut out of the whole. DTensor is not imported
here: a program that has one has imported torch.distributed.tensor itself.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from fastcheck_proto.v1 import state_pb2 as pb

#: Layouts whose box was worked out, and digests of meshes: states have many tensors and few kinds of them.
_KNOWN_MAX = 4096
_boxes: dict[Hashable, Box | None] = {}
_digests: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def is_dtensor(value: object) -> bool:
    """Whether this is a torch DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor on this rank: a DTensor's local part, else the tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    if type(local).__name__ == "AsyncCollectiveTensor":  # a collective that is still under way
        local = local.wait()  # type: ignore[attr-defined]
    return local.detach()


def layout_of(tensor: Any) -> pb.DTensorLayout:
    """How a DTensor is laid out over its mesh, and which box of the whole is here."""
    mesh = tensor.device_mesh
    layout = pb.DTensorLayout(
        global_shape=tuple(tensor.shape),
        global_stride=tuple(tensor.stride()),
        mesh_shape=tuple(mesh.shape),
        mesh_dim_names=mesh.mesh_dim_names or (),
        placements=[str(p) for p in tensor.placements],
        mesh_digest=_mesh_digest(mesh),
    )
    box = box_of(tensor)
    if box is not None:
        layout.box.offset.extend(box.offsets if mesh.get_coordinate() is not None else ())
        layout.box.SetInParent()
    return layout


def layout_mismatch(tensor: torch.Tensor, record: pb.TensorRecord) -> str | None:
    """How the tensor's distribution differs from the record's; None when it is the same."""
    if not is_dtensor(tensor):
        return (
            "is not distributed here, but a DTensor in the checkpoint" if record.HasField("dtensor") else None
        )
    if not record.HasField("dtensor"):
        return "is a DTensor here, but not distributed in the checkpoint"
    here, there = layout_of(tensor), record.dtensor
    for what, a, b in (
        ("global shape", here.global_shape, there.global_shape),
        ("mesh shape", here.mesh_shape, there.mesh_shape),
        ("placements", here.placements, there.placements),
    ):
        if list(a) != list(b):
            return f"has {what} ({_join(a)}) here, ({_join(b)}) in the checkpoint"
    # The same mesh and placements, but another place in them.
    if here.HasField("box") and there.HasField("box") and here.box != there.box:
        return f"begins at ({_join(here.box.offset)}) here, at ({_join(there.box.offset)}) in the checkpoint"
    return None


def box_of(tensor: torch.Tensor) -> Box | None:
    """What this rank has of the whole: of a plain tensor everything; None if a DTensor's local part is no box of it."""
    if not is_dtensor(tensor):
        return Box.whole(tensor.shape)
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Box.whole((0,) * tensor.ndim)
    # Not the mesh itself: it would be kept alive, with its process groups.
    key = (tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), placements)
    if key not in _boxes:
        if len(_boxes) >= _KNOWN_MAX:
            _boxes.clear()
        _boxes[key] = _find_box(tuple(tensor.shape), mesh, coordinate, placements)
    box = _boxes[key]
    return box if box is not None and box.sizes == tuple(local_of(tensor).shape) else None


def saved_box(record: pb.TensorRecord) -> Box | None:
    """What a saved DTensor's local part is of the whole; None if it is not known, or no box of it."""
    layout, shape = record.dtensor, tuple(record.shape)
    ndim = len(layout.global_shape)
    if layout.HasField("box"):
        if not record.bytes:
            return Box.whole((0,) * ndim)
        box = Box(tuple(layout.box.offset), shape)
        return box if box.lies_in(Box.whole(layout.global_shape)) else None
    whole = list(shape) == list(layout.global_shape) and all(p[:1] != "P" for p in layout.placements)
    return Box.whole(shape) if whole else None


def wrap(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor around `local`, laid out like `like`. No communication, no copy on the mesh's own device."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  slow to import; present if `like` is one

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _find_box(shape: tuple[int, ...], mesh: Any, coordinate: Any, placements: tuple[Any, ...]) -> Box | None:
    from torch.distributed.tensor._utils import (  # noqa: PLC0415  as above
        compute_local_shape_and_global_offset,
    )

    if any(placement.is_partial() for placement in placements):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    box = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
    strided = {p.dim for p in placements if "Strided" in type(p).__name__}
    # Where rows lie apart torch gives the first one's offset.
    together = all(_rows_lie_together(dim, shape, mesh, coordinate, placements, box) for dim in strided)
    return box if together else None


def _rows_lie_together(
    dim: int, shape: tuple[int, ...], mesh: Any, coordinate: Any, placements: tuple[Any, ...], box: Box
) -> bool:
    """Whether what is here along a dimension is one run, as the box says: numbers are cut as the tensor was."""
    rows = torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
    for mesh_dim, placement in enumerate(placements):
        if getattr(placement, "dim", None) == dim:
            parts, _ = placement._split_tensor(
                rows, mesh.shape[mesh_dim], with_padding=False, contiguous=False
            )
            rows = parts[coordinate[mesh_dim]]
    low = box.offsets[dim]
    return not rows.numel() or rows.flatten().tolist() == list(range(low, low + box.sizes[dim]))


def _mesh_digest(mesh: Any) -> int:
    digest = _digests.get(mesh)
    if digest is None:
        ranks = ",".join(map(str, mesh.mesh.flatten().tolist()))
        digest = int.from_bytes(hashlib.blake2b(ranks.encode(), digest_size=8).digest(), "little")
        _digests[mesh] = digest
    return digest


def _join(values: Any) -> str:
    return ", ".join(str(v) for v in values)


class Box(NamedTuple):
    """A part of a tensor; empty if some size is 0."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """All of a tensor of this shape."""
        sizes = tuple(shape)
        return Box((0,) * len(sizes), sizes)

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Behind its last element, per dimension."""
        return tuple(low + size for low, size in zip(self.offsets, self.sizes, strict=True))

    def lies_in(self, other: Box) -> bool:
        """Whether all of it is in a box of as many dimensions."""
        return len(self.offsets) == len(self.sizes) == len(other.sizes) and all(
            theirs <= low and high <= end
            for theirs, low, high, end in zip(other.offsets, self.offsets, self.ends, other.ends, strict=True)
        )

    def meet(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        lows = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(high - low for low, high in zip(lows, map(min, self.ends, other.ends), strict=True))
        return Box(lows, sizes) if all(size > 0 for size in sizes) else None

    def minus(self, other: Box) -> list[Box]:
        """What is left without the other's part: at most two boxes per dimension, apart from each other."""
        both = self.meet(other)
        if both is None:
            return [self] if self.elements else []
        left = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (low, high) in enumerate(zip(both.offsets, both.ends, strict=True)):
            start, end = offsets[dim], offsets[dim] + sizes[dim]
            for first, last in ((start, low), (high, end)):
                if first < last:
                    left.append(
                        Box(
                            (*offsets[:dim], first, *offsets[dim + 1 :]),
                            (*sizes[:dim], last - first, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = low, high - low
        return left

    def pieces(self, elements_max: int) -> Iterator[Box]:
        """It in parts of at most so many elements, apart from each other and in order."""
        outer = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if self.elements <= elements_max or outer is None:
            yield self
            return
        half = self.sizes[outer] // 2
        for low, size in ((0, half), (half, self.sizes[outer] - half)):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[outer] += low
            sizes[outer] = size
            yield from Box(tuple(offsets), tuple(sizes)).pieces(elements_max)

    def within(self, other: Box) -> Box:
        """The same part, seen from an enclosing box."""
        return Box(
            tuple(own - theirs for own, theirs in zip(self.offsets, other.offsets, strict=True)), self.sizes
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """It as an index of the whole tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def __str__(self) -> str:
        ranges = (f"{low}:{high}" for low, high in zip(self.offsets, self.ends, strict=True))
        return f"[{', '.join(ranges)}]"


class BoxSource(NamedTuple):
    """A part of a wanted box, and the rank to have it from. Boxes are of the whole."""

    rank: int
    box: Box


class HolesError(Exception):
    """No rank has these parts of what is wanted."""

    def __init__(self, holes: Sequence[Box]) -> None:
        super().__init__(", ".join(map(str, holes)))
        self.holes = tuple(holes)


def cover(wanted: Box, saved: Mapping[int, Box], rank: int) -> list[BoxSource]:
    """Parts that make up the wanted box, apart from each other: few, and as many from `rank` itself as may be.

    Args:
        saved: what each rank has.
        rank: who wants it; of ranks that have the same box others are chosen by it, so that readers spread.

    Raises:
        HolesError: something of it is in no saved box.
    """
    holders: dict[Box, list[int]] = {}
    for other, box in sorted(saved.items()):
        if box.meet(wanted) is not None:
            holders.setdefault(box, []).append(other)
    found: list[BoxSource] = []
    missing = [wanted] if wanted.elements else []
    for box in sorted(holders, key=lambda box: _worth(box, wanted, rank in holders[box]), reverse=True):
        ranks = holders[box]
        source = rank if rank in ranks else ranks[rank % len(ranks)]
        left: list[Box] = []
        for hole in missing:
            part = hole.meet(box)
            if part is not None:
                found.append(BoxSource(source, part))
            left += hole.minus(box)
        missing = left
        if not missing:
            return found
    if missing:
        raise HolesError(missing)
    return found


def _worth(box: Box, wanted: Box, own: bool) -> tuple[int, bool, tuple[int, ...]]:
    """Boxes with more of what is wanted come first, of those alike the rank's own; the rest is for a fixed order."""
    both = box.meet(wanted)
    return (0 if both is None else both.elements), own, tuple(-offset for offset in box.offsets)
