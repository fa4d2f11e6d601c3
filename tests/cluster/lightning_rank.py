"""One rank of a Lightning fit under DDP; see test_lightning_ddp.py.

`python -m tests.cluster.lightning_rank KILL_AT` with torchrun's variables: prints a line per step, and kills
itself after step KILL_AT (0: never) once a step before it is committed.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from tests.cluster.harness import until
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from fastcheck import Checkpointer
from fastcheck.integrations.lightning import FastCheckCallback, FastCheckIO

STEPS = 20


class Net(pl.LightningModule):
    """Dropout, so that the random states of each rank count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """One line per step."""
        (x,) = batch
        loss = nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))
        print("step", self.global_step + 1, "loss", loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With moments."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Killer(pl.Callback):
    """SIGKILL, as soon as there is something to resume from."""

    def __init__(self, io: FastCheckIO, at: int) -> None:
        self._io, self._at = io, at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """After the callback that saves."""
        if trainer.global_step == self._at:
            until(lambda: max(self._io.checkpointer.steps(), default=0) >= self._at - 3, "a committed step")
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train to the end, or to the kill."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    sampler = StatefulDistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=0)
    io = FastCheckIO(Checkpointer(job="lightning-ddp"))
    newest = io.newest()
    print("begins after step", newest if newest is not None else 0, flush=True)
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60)),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        plugins=[io],
        callbacks=[FastCheckCallback(io, every=1), Killer(io, int(sys.argv[1]))],
    )
    trainer.fit(Net(), StatefulDataLoader(data, batch_size=4, sampler=sampler), ckpt_path=newest)
    io.checkpointer.close()


if __name__ == "__main__":
    main()
