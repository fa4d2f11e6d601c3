"""DTensors: the local part is saved with its layout, and only goes back into the same layout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tests.unit.fastcheck.state_bytes import bits, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fastcheck import StateMismatchError
from fastcheck.state.flatten import flatten
from fastcheck.state.header import parse


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def sharded(mesh, tensor, *placements):
    return distribute_tensor(tensor, mesh, list(placements) or [Shard(0)])


def test_a_dtensor_comes_back_in_place(mesh):
    source = sharded(mesh, torch.randn(6, 4))
    kept = snapshot({"t": source})
    target = sharded(mesh, torch.zeros(6, 4))
    kept.fill({"t": target})
    kept.scribble()
    assert isinstance(target, DTensor)
    assert bits(target.to_local()) == bits(source.to_local())


def test_the_layout_is_recorded(mesh):
    flat = flatten({"t": sharded(mesh, torch.randn(6, 4), Shard(1))})
    record = parse(flat.header, flat.state_bytes).tensors[0]
    assert list(record.dtensor.global_shape) == [6, 4]
    assert list(record.dtensor.global_stride) == [4, 1]
    assert list(record.dtensor.mesh_shape) == [1]
    assert list(record.dtensor.mesh_dim_names) == ["dp"]
    assert list(record.dtensor.placements) == ["S(1)"]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda m: torch.zeros(6, 4), "not distributed here, but a DTensor"),
        (
            lambda m: sharded(m, torch.zeros(6, 4), Replicate()),
            "placements (R) here, (S(0)) in the checkpoint",
        ),
        (lambda m: sharded(m, torch.zeros(7, 4)), "global shape (7, 4) here, (6, 4) in the checkpoint"),
        (lambda m: sharded(m, torch.zeros(6, 4, dtype=torch.float64)), "dtype"),
        (
            lambda m: distribute_tensor(
                torch.zeros(6, 4), init_device_mesh("cpu", (1, 1)), [Shard(0), Replicate()]
            ),
            "mesh shape (1, 1) here, (1) in the checkpoint",
        ),
    ],
)
def test_another_layout_is_a_mismatch(mesh, make, word):
    target = make(mesh)
    with pytest.raises(StateMismatchError) as caught:
        snapshot({"t": sharded(mesh, torch.ones(6, 4))}).fill({"t": target})
    assert word in str(caught.value)
    assert not target.any() if not isinstance(target, DTensor) else not target.to_local().any()


def test_a_plain_tensor_does_not_go_into_a_dtensor(mesh):
    with pytest.raises(StateMismatchError, match="not distributed in the checkpoint"):
        snapshot({"t": torch.ones(6, 4)}).fill({"t": sharded(mesh, torch.zeros(6, 4))})


def fsdp(mesh, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net, optimizer, steps):
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def local_bits(state_dict):
    return {
        k: bits(v.to_local() if isinstance(v, DTensor) else v)
        for k, v in state_dict.items()
        if torch.is_tensor(v)
    }


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_fully_sharded_training_goes_on_bit_for_bit(mesh, stepped):
    net, optimizer = fsdp(mesh)
    train(net, optimizer, 3)
    kept = snapshot({"model": net, "optimizer": optimizer})
    again, other = fsdp(mesh, seed=9)
    if stepped:
        train(again, other, 1)
    kept.fill({"model": again, "optimizer": other})
    kept.scribble()
    assert local_bits(again.state_dict()) == local_bits(net.state_dict())
    for key, state in optimizer.state_dict()["state"].items():
        restored = other.state_dict()["state"][key]
        assert local_bits(restored) == local_bits(state)
        assert isinstance(restored["exp_avg"], DTensor)
        assert restored["exp_avg"].placements == state["exp_avg"].placements
        assert not isinstance(restored["step"], DTensor)
    assert train(again, other, 3) == train(net, optimizer, 3)


def test_a_sharded_optimizer_does_not_go_into_a_plain_one(mesh):
    net, optimizer = fsdp(mesh)
    train(net, optimizer, 1)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    target = torch.optim.AdamW(plain.parameters())
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(StateMismatchError) as caught:
        snapshot({"m": net, "o": optimizer}).fill({"m": plain, "o": target})
    text = "\n".join(caught.value.mismatches)
    assert "state['m']['0.weight'] is not distributed here" in text
    assert "state['o']['state'][0]['exp_avg'] is not distributed here" in text
    assert target.state_dict() == before


class Average:
    """An object of the caller's with DTensors in its state."""

    def __init__(self, tensor):
        self.shadow = {"w": [tensor]}

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict):
        self.shadow = state_dict["shadow"]


def test_own_objects_with_dtensors_get_dtensors(mesh):
    source = Average(sharded(mesh, torch.randn(6, 4)))
    kept = snapshot({"ema": source})
    target = Average(sharded(mesh, torch.zeros(6, 4)))
    kept.fill({"ema": target})
    kept.scribble()
    restored = target.shadow["w"][0]
    assert isinstance(restored, DTensor)
    assert bits(restored.to_local()) == bits(source.shadow["w"][0].to_local())
    with pytest.raises(StateMismatchError, match=r"state\['ema'\]\['shadow'\]\['w'\]\[0\]"):
        kept.fill({"ema": Average(torch.zeros(6, 4))})
