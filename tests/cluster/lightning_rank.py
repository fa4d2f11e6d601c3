"""A rank of a Lightning fit; see test_resuming_frameworks.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from tests.cluster.resuming import Rank, newest_in
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from fastcheck.integrations.lightning import FastCheckIO, MemoryCheckpoint

STEPS_PER_EPOCH = 6


class Net(pl.LightningModule):
    """Dropout, and a learning rate that the validation's outcome moves."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Tells the loss, and which epoch Lightning takes this for."""
        (x,) = batch
        loss = nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))
        self._rank.tell(step=self.global_step + 1, epoch=self.current_epoch, loss=loss.item().hex())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Draws numbers of its own."""
        (x,) = batch
        noisy = x + 0.01 * torch.randn_like(x)
        self.log("validated", nn.functional.mse_loss(self.net(noisy), x.sum(1, keepdim=True)), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """A schedule per step, or one that goes by the validation, which Lightning's own files do not have yet."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self._rank.options["validates"] or "disk" in self._rank.options:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "validated"}}


class Ending(pl.Callback):
    """Ends the run where the test wants it. Comes after the callback that saves."""

    def __init__(self, rank: Rank, newest: Callable[[], int]) -> None:
        self._rank, self._newest = rank, newest

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._rank.kill_if("killed", trainer.global_step, self._newest)

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._rank.kill_if("validating", trainer.global_step, self._newest)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._rank.stop_if(trainer.global_step):
            trainer.should_stop = True


def train(rank: Rank) -> None:
    """Three epochs of six steps.

    Options: `stateful` loader, `validates`: how often in an epoch, `limit` of the run, `disk`: when ModelCheckpoint
    saves; then nothing is saved to memory.
    """
    pl.seed_everything(rank.rank, verbose=False)
    size = 4 * STEPS_PER_EPOCH
    data = torch.utils.data.TensorDataset(torch.randn(size, 4, generator=torch.Generator().manual_seed(0)))
    options: dict[str, Any] = {"batch_size": 4 // rank.world_size}
    if rank.world_size > 1:
        options["sampler"] = StatefulDistributedSampler(
            data, num_replicas=rank.world_size, rank=rank.rank, shuffle=True, seed=0
        )
    else:
        options["shuffle"] = True
    loader = (StatefulDataLoader if rank.options["stateful"] else torch.utils.data.DataLoader)(
        data, **options
    )
    validated = torch.utils.data.DataLoader(data, batch_size=8)
    validates = rank.options["validates"]
    io = FastCheckIO(rank.checkpointer())
    disk = rank.options.get("disk")
    folder = rank.out.parent / f"{rank.job}{os.environ.get('FASTCHECK_DISABLE', '')}"
    files = [ModelCheckpoint(folder, save_top_k=-1, **disk)] if disk else []

    def newest() -> int:
        return newest_on_disk(folder) if disk else newest_in(io.checkpointer)

    trainer = pl.Trainer(
        **rank.options["limit"],
        accelerator="cpu",
        devices=rank.world_size,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
        if rank.world_size > 1
        else "auto",
        val_check_interval=1 / max(1, validates),
        limit_val_batches=1.0 if validates else 0,
        logger=False,
        enable_checkpointing=bool(disk),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        plugins=[io],
        callbacks=[MemoryCheckpoint(io, every=1000 if disk else 1), Ending(rank, newest), *files],
    )
    found = io.newest(folder)
    rank.tell(begins=newest() if found else 0)
    torch.manual_seed(0)
    model = Net(rank)
    torch.manual_seed(rank.rank)
    trainer.fit(model, loader, validated, ckpt_path=found)
    rank.tell_end(model)
    if not disk:
        rank.close(io.checkpointer)


def newest_on_disk(folder: Path) -> int:
    return max((int(path.stem.partition("step=")[2]) for path in folder.glob("*.ckpt")), default=0)
