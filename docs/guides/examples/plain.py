"""Plain PyTorch: one process that goes on bit for bit after it was killed. Run it, kill it, run it again.

FASTCHECK_DISABLE=1 turns FastCheck off; a daemon that dies is a line in the log.
"""

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import fastcheck
from fastcheck.resume import run_state

STEPS = 40


class Squares(torch.utils.data.Dataset):
    """Numbers and their squares, with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / 96.0])
        return x, x * x + 0.01 * torch.randn(1)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
loader = StatefulDataLoader(Squares(), batch_size=8, shuffle=True)

state = {"model": model, "optimizer": optimizer, **run_state(loader=loader, scheduler=scheduler)}
due = fastcheck.every(step=1)  # or every(seconds=30), or both

with fastcheck.Checkpointer(job="plain") as ckpt:
    step = ckpt.load(state) or 0
    print("begins after step", step, flush=True)
    while step < STEPS:
        for x, y in loader:
            step += 1
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if due(step):
                ckpt.save(step, state)  # never raises because of a daemon, a peer or a registry
            print("step", step, "loss", loss.item().hex(), flush=True)
            if step == STEPS:
                break
    print(ckpt.advise(mtbf_s=3600.0), flush=True)
