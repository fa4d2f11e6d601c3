"""What ranks joined by torch.distributed do in test_loads_of_all_ranks.py."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from tests.cluster.resuming import Rank

from fastcheck import InvalidArgumentError, LoadFailedError


def try_again(rank: Rank) -> None:
    """Rank 1 fails before it could tell rank 0, which gives up; then both load, again and again."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    with rank.checkpointer(ranks_timeout_s=1.0) as ckpt:
        ckpt.save(1, {"x": torch.full((4,), 1.0 + rank.rank)}).result(timeout=60)
    dist.barrier()
    with rank.checkpointer(ranks_timeout_s=20.0) as ckpt:
        state = {"x": torch.zeros(4)}
        if rank.rank == 1:
            with pytest.raises(InvalidArgumentError, match="step"):
                ckpt.load(state, step=-1)
        else:
            with (
                rank.checkpointer(ranks_timeout_s=1.0) as hasty,
                pytest.raises(LoadFailedError, match="rank 1 did not take part"),
            ):
                hasty.load(state)
        dist.barrier()
        for _ in range(2):
            state["x"].zero_()
            assert ckpt.load(state) == 1
            assert state["x"].tolist() == [1.0 + rank.rank] * 4
    dist.destroy_process_group()
