"""DTensors, without importing them: a program that has one has imported torch.distributed.tensor itself.

What is saved is the rank's local part and a record of how it was cut out of the whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from fastcheck_proto.v1 import state_pb2 as pb


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
    """How a DTensor is laid out over its mesh."""
    return pb.DTensorLayout(
        global_shape=tuple(tensor.shape),
        global_stride=tuple(tensor.stride()),
        mesh_shape=tuple(tensor.device_mesh.shape),
        mesh_dim_names=tensor.device_mesh.mesh_dim_names or (),
        placements=[str(p) for p in tensor.placements],
    )


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
    return None


def wrap(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor around `local`, laid out like `like`. No communication, no copy on the mesh's own device."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  slow to import; present if `like` is one

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _join(values: Any) -> str:
    return ", ".join(str(v) for v in values)
