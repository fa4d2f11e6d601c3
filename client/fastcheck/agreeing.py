"""One step for all ranks, when no registry says which: the newest that every rank can load. And rank 0's word for all.

Ranks speak through torch.distributed, with tensors only: a process group of whatever backend the job has. Every rank
takes part whatever it found, so that none waits for one that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .errors import FastCheckError, InvalidArgumentError, LoadFailedError

#: Newest steps that a rank tells the others of.
STEPS_TOLD_MAX = 62
_OK, _FAILED = 0, 1


def agree_on_step(loadable: Callable[[], tuple[list[int], bool]], rank: int, world_size: int) -> int | None:
    """The newest step that all ranks can load; None when there is none and all ranks have a registry that says so.

    Args:
        loadable: steps that this rank could load, and whether they were found without the registry.

    Raises:
        InvalidArgumentError: torch.distributed does not join the ranks and no registry answers: they cannot agree.
        LoadFailedError: no step is there for all, or another rank failed.
        FastCheckError: what `loadable` raised.
    """
    if not _joined(world_size):
        steps, provisional = loadable()
        if not provisional:
            return max(steps, default=None)
        raise InvalidArgumentError(
            f"the registry does not answer, and the {world_size} ranks cannot agree on a step: initialise "
            "torch.distributed first, or pass the same step= on every rank. Complete steps, as this rank sees it: "
            f"{_listed(steps)}"
        )
    try:
        steps, provisional = loadable()
    except FastCheckError:
        _exchange(_FAILED, [], provisional=False, world_size=world_size)
        raise
    told = _exchange(_OK, steps, provisional=provisional, world_size=world_size)
    failed = [other for other, (status, _, _) in enumerate(told) if status != _OK]
    if failed:
        raise LoadFailedError(f"rank {failed[0]} cannot load: see its error; no rank has loaded anything")
    common = set.intersection(*(set(theirs) for _, _, theirs in told))
    if common:
        return max(common)
    if not any(without for _, without, _ in told):
        return None
    mine = told[rank][2]
    raise LoadFailedError(
        "the registry does not answer, and no step is complete for all ranks "
        f"(rank {rank} sees {_listed(mine)}): bring back nodes that held more, or a majority of the voters"
    )


def from_rank_0(numbers: Sequence[int]) -> list[int]:
    """What rank 0 passed, on every rank.

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
    """What every rank passed, by rank; as many numbers each.

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


def _exchange(
    status: int, steps: Sequence[int], *, provisional: bool, world_size: int
) -> list[tuple[int, bool, list[int]]]:
    """Tell all ranks and hear them, by rank."""
    newest = sorted(steps)[-STEPS_TOLD_MAX:]
    row = [status, int(provisional), *newest, *[-1] * (STEPS_TOLD_MAX - len(newest))]
    told = from_all(row, world_size)
    return [(each[0], bool(each[1]), [step for step in each[2:] if step >= 0]) for each in told]


def _device() -> torch.device:
    """Where the process group's tensors live: the CPU where a backend serves it, else this rank's GPU."""
    config = str(dist.get_backend_config())
    backends = {part.rpartition(":")[2] for part in config.split(",")}
    if backends & {"gloo", "mpi", "ucc"}:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    raise InvalidArgumentError(
        f"ranks cannot agree on a step through torch.distributed with {config}: pass the same step= on every rank"
    )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"
