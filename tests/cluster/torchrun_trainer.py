"""What torchrun starts in tests/cluster/test_torchrun.py: FSDP2 on the CPU, saved after each step, resumed at start.

Whatever the number of ranks, the losses are the same bit for bit: rank 0 alone has a gradient, times a power of two.
argv: folder for what each rank notes, last step. Faults come from the environment, in a launcher's first attempt alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastcheck import Checkpointer, FastCheckError
from fastcheck.integrations.disk_fallback import load_newer

WIDTH = 96


def make_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    )


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The same batch on every rank."""
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


def fault(name: str) -> str:
    """What is to go wrong: nothing once torchrun has started this rank again."""
    return os.environ.get(f"TEST_{name}", "") if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else ""


def main() -> None:
    """One attempt of one rank."""
    out, last = Path(sys.argv[1]), int(sys.argv[2])
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
    # The job's name is torchrun's --rdzv-id.
    with Checkpointer(
        address=f"unix://{out}/nobody.sock" if fault("LOST_RANK") == str(rank) else None
    ) as ckpt:
        loaded = load(ckpt, state, note)
        for step in range((loaded or 0) + 1, last + 1):
            if fault("KILL") == f"{rank}@{step}":
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ.get("TEST_STAND_STILL") == str(step):
                (out / f"still-{rank}").touch()
                signal.pause()
            loss = loss_of(model, step)
            optimizer.zero_grad()
            (loss * (world if rank == 0 else 0)).backward()
            optimizer.step()
            progress.update(step=step, loss=loss.item())
            ckpt.save(step, state).result(timeout=60)
            note(step=step, loss=loss.item().hex())
    dist.destroy_process_group()


def load(ckpt: Checkpointer, state: Any, note: Callable[..., None]) -> int | None:
    """Fill `state`; an error is noted and, once all ranks have one, ends this attempt."""
    if os.environ.get("TEST_DISK"):
        note(newer=load_newer(ckpt, state, int(os.environ["TEST_DISK"])))
    heard: list[int] = []
    try:
        loaded = ckpt.load(state, progress=lambda news: heard.append(news.bytes_done))
    except FastCheckError as error:
        note(error=type(error).__name__, message=str(error))
        dist.barrier()
        raise
    note(
        job=ckpt.job,
        loaded=loaded,
        own=ckpt.loaded_own,
        saved_by=ckpt.load_stats.get("saved_by"),
        heard=heard[-1] if heard else None,
        progress=dict(state["progress"]),
    )
    return loaded


if __name__ == "__main__":
    main()
