"""What ranks joined by torch.distributed do in test_loads_of_all_ranks.py."""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cluster.resuming import Rank

from fastcheck import Checkpointer, FastCheckError, InvalidArgumentError, LoadFailedError, SaveHandle


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


def load_again_together(rank: Rank) -> None:
    """What one rank has not saved yet when all load again is nobody's, also where the ranks agree on the step."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    with rank.checkpointer() as ckpt:
        state = {"x": torch.zeros(2)}
        ckpt.save(1, state).result(timeout=60)
        if rank.rank == 0:
            ckpt.save(2, state).wait_replicated(60)
        dist.barrier()
        assert ckpt.load(state) == 1
        if rank.rank == 1:
            handle = ckpt.save(2, {"x": torch.full((2,), 7.0)})
            handle.wait_replicated(60)
        dist.barrier()
        assert ckpt.load(state) == 1
        ckpt.save(2, {"x": torch.full((2,), 8.0)}).result(timeout=60)
        dist.barrier()
        assert ckpt.load(state) == 2
        assert state["x"].tolist() == [8.0, 8.0]
    dist.destroy_process_group()


def obey(job: str, rank: int, world_size: int, address: str) -> None:
    """A trainer without a process group that does what stdin says; what it saves says who saved it."""
    torch.set_num_threads(1)
    ckpt = Checkpointer(job, rank=rank, world_size=world_size, address=address)
    handles: dict[int, SaveHandle] = {}
    state = {"saved_by": torch.zeros(3, dtype=torch.int64)}
    for line in sys.stdin:
        what, step = json.loads(line)
        answer: Any = None
        try:
            if what == "load":
                answer = ckpt.load(state, step or None)
                assert answer is None or state["saved_by"].tolist()[:2] == [answer, rank]
            elif what == "save":
                state["saved_by"] = torch.tensor([step, rank, os.getpid()])
                handles[step] = ckpt.save(step, state)
            elif what == "replicated":
                handles[step].wait_replicated(60)
            else:
                handles[step].result(timeout=60)
                answer = "committed"
        except FastCheckError as error:
            answer = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
