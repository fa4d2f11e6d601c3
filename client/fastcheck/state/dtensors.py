"""DTensors, without importing them: a program that has one has imported torch.distributed.tensor itself.

What is saved is the rank's local part and a record of how it was cut out of the whole.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from .covering import Box

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
