"""torch.distributed.checkpoint into other nodes' RAM: FSDP2, saved in the background, resumed when the run was killed.

torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id dcp dcp_async.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastcheck.dcp import FastCheckReader, FastCheckWriter

STEPS, EVERY = 60, 2

dist.init_process_group("gloo")
rank = dist.get_rank()
background = dist.new_group(backend="gloo")  # saves talk while training does: not over the same connections
torch.manual_seed(0)  # all ranks build the same model
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # from here each draws numbers of its own: data and dropout


class Training:
    """What DCP saves and loads, as `Stateful`."""

    def state_dict(self) -> dict[str, object]:
        """Shards of the model and its moments; under each rank's own name its random numbers."""
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, f"random{rank}": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """The same, back into model, optimizer and generator."""
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(state[f"random{rank}"])


def load() -> int:
    """The step to go on from; 0: there is none, or FastCheck is turned off. What cannot be known raises."""
    reader = FastCheckReader()  # of torchrun's --rdzv-id, as the writer
    step = reader.newest()
    if step is not None:
        dcp.load({"training": Training()}, checkpoint_id=f"step-{step}", storage_reader=reader)
    return step or 0


def wait_for(save) -> None:
    """A save that failed costs a step, not the training."""
    try:
        save.result()
    except CheckpointException as error:  # no Exception: nothing else catches it
        print("a save failed:", *[cause[0] for cause in error.failures.values()][:1], flush=True)


step, save = load(), None
writer = FastCheckWriter()
print("rank", rank, "pid", os.getpid(), "begins after step", step, flush=True)
while step < STEPS:
    step += 1
    x = torch.randn(8, 16)
    loss = nn.functional.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % EVERY == 0:
        if save is not None:
            wait_for(save)  # one at a time, as DCP asks
        save = dcp.async_save(
            {"training": Training()},
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            process_group=background,
        )
    if rank == 0:
        print("step", step, "loss", loss.item().hex(), flush=True)
wait_for(save)
writer.close()
dist.destroy_process_group()
