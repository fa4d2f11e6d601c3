"""What torchrun starts in tests/cluster/test_torchrun_*.py: FSDP2 on the CPU, saved after each step, resumed at start.

Whatever the number of ranks, the losses are the same bit for bit: rank 0 alone has a gradient, times a power of two.
argv: folder for the log, last step. A fault comes from the environment, in the first attempt alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastcheck import Checkpointer, FastCheckError

WIDTH = 96


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    )


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def reference(steps: int) -> list[str]:
    """The losses of a run that nothing happens to, without any of all this."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(1, steps + 1):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
    return found


def main() -> None:
    out, last = Path(sys.argv[1]), int(sys.argv[2])
    first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = (out / f"{rank}.jsonl").open("a", buffering=1)

    def note(**what: object) -> None:
        log.write(json.dumps({"rank": rank, "world": world, **what}) + "\n")

    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress = {"step": 0, "loss": 0.0}
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    lost = os.environ.get("TEST_LOST_RANK") == str(rank)
    address = f"unix://{out}/nobody.sock" if lost else None
    with Checkpointer(address=address) as ckpt:  # the job's name is torchrun's --rdzv-id
        try:
            loaded = ckpt.load(state)
        except FastCheckError as error:
            note(error=type(error).__name__, message=str(error))
            return
        note(
            job=ckpt.job,
            loaded=loaded,
            own=ckpt.loaded_own,
            stats=dict(ckpt.load_stats),
            progress=dict(progress),
        )
        for step in range((loaded or 0) + 1, last + 1):
            if first_attempt and os.environ.get("TEST_KILL") == f"{rank}@{step}":
                os.kill(os.getpid(), signal.SIGKILL)
            if first_attempt and os.environ.get("TEST_STAND_STILL") == str(step):
                (out / "still").touch()
                signal.pause()
            loss = loss_of(model, step)
            optimizer.zero_grad()
            (loss * (world if rank == 0 else 0)).backward()
            optimizer.step()
            progress.update(step=step, loss=loss.item())
            handle = ckpt.save(step, state)
            handle.result(timeout=60)
            note(step=step, loss=loss.item().hex(), bytes=handle.stats["bytes"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
