"""A few numbers from rank 0, or from every rank, through collectives of torch.distributed.

Only tensors are sent, so any backend of the job's process group will do. Every rank has to call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .errors import InvalidArgumentError


def from_rank_0(numbers: Sequence[int]) -> list[int]:
    """The numbers that rank 0 passed, on every rank.

    Raises:
        InvalidArgumentError: torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgumentError(
            "clocks differ from rank to rank, and the ranks cannot agree on when to save: initialise torch.distributed "
            "first, or save by steps"
        )
    told = torch.tensor(list(numbers), dtype=torch.int64, device=_device())
    dist.broadcast(told, src=0)
    found: list[int] = told.tolist()
    return found


def from_all(numbers: Sequence[int], world_size: int) -> list[list[int]]:
    """The numbers that every rank passed, by rank. All pass equally many.

    Raises:
        InvalidArgumentError: there are other ranks, and torch.distributed does not join them.
    """
    if world_size == 1:
        return [list(numbers)]
    if not _joined(world_size):
        raise InvalidArgumentError(
            f"the {world_size} ranks cannot agree on what to resume from: initialise torch.distributed first"
        )
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=_device())
    rows = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def _joined(world_size: int) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size


def _device() -> torch.device:
    """The device for the process group's tensors: the CPU where a backend supports it, else this rank's GPU."""
    config = str(dist.get_backend_config())
    backends = {part.rpartition(":")[2] for part in config.split(",")}
    if backends & {"gloo", "mpi", "ucc"}:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    raise InvalidArgumentError(
        f"torch.distributed with {config} has no tensors that this process could send: initialise it with gloo as well"
    )
