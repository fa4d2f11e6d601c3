"""One rank of a gloo process group that saves and loads a model in every layout; see test_layout_pairs.py.

`python -m tests.cluster.layout_ranks RANK PORT ADDRESS OUT PAIR...`: for each pair "saved:loaded" the model is trained
and saved in one layout, by the Checkpointer and by DCP through the same daemon, and loaded by both in the other one.
OUT gets {"saved:loaded": {"checkpointer": "" or what went wrong, "dcp": ...}} as JSON.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastcheck import Checkpointer
from fastcheck.dcp import FastCheckReader, FastCheckWriter

WORLD = 4
#: What the plan of tensor parallelism names; norms, the embedding and the head are left out, as in most models.
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@dataclass(frozen=True)
class Layout:
    """A model's way over the first so many ranks: the mesh, and what is done along its dimensions."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return int(torch.Size(self.shape).numel())


#: Of four ranks and fewer. `fsdp` shards, `hsdp` keeps copies of what is sharded, `tp` is tensor parallelism.
LAYOUTS = {
    "fsdp4": Layout((4,), ("fsdp",)),
    "fsdp3": Layout((3,), ("fsdp",)),
    "fsdp2": Layout((2,), ("fsdp",)),
    "fsdp1": Layout((1,), ("fsdp",)),
    "hsdp2x2": Layout((2, 2), ("hsdp", "fsdp")),
    "hsdp4x1": Layout((4, 1), ("hsdp", "fsdp")),
    "hsdp2x1": Layout((2, 1), ("hsdp", "fsdp")),
    "tp4": Layout((4,), ("tp",)),
    "tp2": Layout((2,), ("tp",)),
    "fsdp2xtp2": Layout((2, 2), ("fsdp", "tp")),
    "fsdp4xtp1": Layout((4, 1), ("fsdp", "tp")),
    "fsdp1xtp4": Layout((1, 4), ("fsdp", "tp")),
    "fsdp1xtp2": Layout((1, 2), ("fsdp", "tp")),
    "fsdp2xtp1": Layout((2, 1), ("fsdp", "tp")),
    "hsdp2xfsdp1xtp2": Layout((2, 1, 2), ("hsdp", "fsdp", "tp")),
    "hsdp1xfsdp2xtp2": Layout((1, 2, 2), ("hsdp", "fsdp", "tp")),
    "whole": Layout((1,), ()),
}


class Net(nn.Module):
    """Sizes that no number of ranks divides, a norm, an embedding that is tied to the head, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 20)
        self.down = nn.Linear(20, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(self.up(self.embed(x)).relu())))


@functools.cache  # a mesh has process groups of its own, and making one is for all ranks
def mesh_of(layout: Layout) -> DeviceMesh:
    ranks = torch.arange(layout.world_size).view(layout.shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=layout.dims)


class App:
    """Model and optimizer in a layout, on a rank that takes part in it."""

    def __init__(self, layout: Layout, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        if layout.dims:
            mesh = mesh_of(layout)
            if "tp" in layout.dims:
                parallelize_module(self.model, mesh["tp"], PLAN)
            sharded = tuple(dim for dim in layout.dims if dim != "tp")
            if sharded:
                fully_shard(self.model, mesh=mesh[sharded] if len(sharded) < len(layout.dims) else mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self) -> None:
        """One step; also shows that a state that was loaded can be trained on."""
        batch = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(1))
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def gathered(self) -> dict[str, torch.Tensor]:
        """All tensors, whole."""
        state = self.state_dict()
        found = {f"model.{name}": whole(tensor) for name, tensor in state["model"].items()}
        for fqn, moments in state["optimizer"]["state"].items():
            found |= {f"optimizer.{fqn}.{slot}": whole(tensor) for slot, tensor in moments.items()}
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Ranks:
    """All pairs, as one rank goes through them together with the others."""

    def __init__(self, rank: int, address: str) -> None:
        self._rank = rank
        self._address = address
        #: Of each layout that was saved: what the others must find, on the ranks that took part.
        self._saved: dict[str, dict[str, torch.Tensor]] = {}
        self._groups = {size: dist.new_group(list(range(size))) for size in range(1, WORLD + 1)}
        for layout in LAYOUTS.values():  # by all ranks, in one order
            if layout.dims:
                mesh_of(layout)

    def pair(self, saved: str, loaded: str) -> dict[str, str]:
        if saved not in self._saved:
            self._saved[saved] = self._save(saved)
        layout = LAYOUTS[loaded]
        found = {}
        for how in ("checkpointer", "dcp"):
            found[how] = ""
            if self._rank < layout.world_size:
                try:
                    self._load(how, saved, layout)
                except BaseException:  # noqa: BLE001  DCP's own exception is no Exception
                    found[how] = traceback.format_exc()
            dist.barrier()
        return found

    def _save(self, name: str) -> dict[str, torch.Tensor]:
        layout = LAYOUTS[name]
        gathered: dict[str, torch.Tensor] = {}
        if self._rank < layout.world_size:
            app = App(layout, seed=3)
            app.train()
            gathered = app.gathered()
            with self._checkpointer(name, layout) as ckpt:
                ckpt.save(1, {"model": app.model, "optimizer": app.optimizer}).result(timeout=60)
            writer = FastCheckWriter(f"dcp-{name}", address=self._address)
            dcp.save(
                {"app": app},
                checkpoint_id="step-1",
                storage_writer=writer,
                process_group=self._groups[layout.world_size],
            )
            writer.close()
        # A rank that had no part in it judges by what rank 0 has.
        told = [gathered]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def _load(self, how: str, saved: str, layout: Layout) -> None:
        app = App(layout, seed=9)
        if how == "dcp":
            dcp.load(
                {"app": app},
                checkpoint_id="step-1",
                storage_reader=FastCheckReader(f"dcp-{saved}", address=self._address),
                process_group=self._groups[layout.world_size],
            )
        else:
            with self._checkpointer(saved, layout) as ckpt:
                assert ckpt.load({"model": app.model, "optimizer": app.optimizer}) == 1
        dist.barrier(self._groups[layout.world_size])
        wanted, found = self._saved[saved], app.gathered()
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), key
        app.train()

    def _checkpointer(self, name: str, layout: Layout) -> Checkpointer:
        return Checkpointer(
            f"native-{name}", rank=self._rank, world_size=layout.world_size, address=self._address
        )


def main(rank: str, port: str, address: str, out: str, *pairs: str) -> None:
    os.environ |= {"RANK": rank, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    faulthandler.dump_traceback_later(100, repeat=True)  # where it hangs, if it does
    ranks = Ranks(int(rank), address)
    found = {}
    for pair in pairs:
        began = time.monotonic()
        found[pair] = ranks.pair(*pair.split(":"))
        print(f"{pair}: {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201  the log of a failed test
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
