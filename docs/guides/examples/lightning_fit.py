"""Lightning: each step to other nodes' RAM beside the files of ModelCheckpoint, and on from the newest of both."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from fastcheck import Checkpointer
from fastcheck.integrations.lightning import FastCheckIO, MemoryCheckpoint


class Net(pl.LightningModule):
    """A small regression with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """One line per step."""
        (x,) = batch
        loss = nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))
        print("step", self.global_step + 1, "loss", loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """With a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


folder = sys.argv[1]
pl.seed_everything(0)
# Lightning goes on in the middle of an epoch with a loader that knows its place.
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
io = FastCheckIO(Checkpointer(job="lightning"))
newest = io.newest(folder)
print("begins after step", newest if newest is not None else 0, flush=True)
trainer = pl.Trainer(
    max_steps=45,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[io],
    callbacks=[
        MemoryCheckpoint(io, every=1),
        ModelCheckpoint(folder, every_n_train_steps=20, save_top_k=-1),
    ],
)
trainer.fit(Net(), loader, ckpt_path=newest)
io.checkpointer.close()
