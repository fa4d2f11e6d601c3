"""Accelerate: the prepared objects as one state, each step to other nodes' RAM."""

import torch
from accelerate import Accelerator
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from fastcheck import Checkpointer
from fastcheck.integrations.accelerate import accelerator_state

STEPS = 40

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = StatefulDataLoader(data, batch_size=4, shuffle=True)  # not prepared: it keeps its place by itself
model, optimizer, scheduler = accelerator.prepare(net, adam, torch.optim.lr_scheduler.StepLR(adam, 10))
state = accelerator_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

with Checkpointer(job="accelerate") as ckpt:
    step = ckpt.load(state) or 0
    print("begins after step", step, flush=True)
    while step < STEPS:
        for (batch,) in loader:
            step += 1
            x = batch.to(accelerator.device)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ckpt.save(step, state)
            print("step", step, "loss", loss.item().hex(), flush=True)
            if step == STEPS:
                break
