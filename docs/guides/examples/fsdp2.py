"""FSDP2 under torchrun: each rank saves its shards, and all go on from one step when the run was killed.

torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id gpt fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastcheck
from fastcheck.resume import run_state

STEPS = 60

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # all ranks build the same model
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model[0], mesh=mesh)
fully_shard(model[3], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # from here each draws numbers of its own: data and dropout

state = {"model": model, "optimizer": optimizer, **run_state()}

with fastcheck.Checkpointer() as ckpt:  # torchrun says which rank of how many; the job is its --rdzv-id
    step = ckpt.load(state) or 0
    if (
        step and not ckpt.loaded_own
    ):  # there are more ranks than before, and this one was given rank 0's numbers
        torch.manual_seed(1000 * step + rank)
    print("rank", rank, "pid", os.getpid(), "begins after step", step, flush=True)
    while step < STEPS:
        step += 1
        x = torch.randn(8, 16)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step, state)
        if rank == 0:
            print("step", step, "loss", loss.item().hex(), flush=True)
dist.destroy_process_group()
