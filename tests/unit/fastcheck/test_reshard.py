"""A step goes into ranks, meshes and placements other than those that saved it; torch's own cutting is the judge.

All ranks live in one process, one after the other: torch's fake process group says who is who and moves nothing.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fastcheck.state_bytes import bits, snapshot
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastcheck import StateMismatchError, WorldSizeError
from fastcheck.reshard import load_resharded
from fastcheck.saved_rank import SavedRank
from fastcheck.step_reader import StepReader


@contextlib.contextmanager
def being(rank, world_size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # What torch remembers of operations has the meshes of the rank that this process just was.
        _clear_sharding_prop_cache()


def mesh_of(shape, ranks=None):
    numbers = torch.arange(torch.Size(shape).numel()) if ranks is None else torch.tensor(ranks)
    return DeviceMesh("cpu", numbers.view(*shape), _init_backend=False)


def cut(whole, mesh, placements):
    """This rank's DTensor, cut by torch's own placements."""
    local = whole
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if hasattr(placement, "dim"):
            parts, _ = placement._split_tensor(local, mesh.shape[dim], with_padding=False, contiguous=True)
            local = parts[coordinate[dim]]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class Reader:
    """What `StepReader` is for a load, from states in this process; only what is asked for can be seen."""

    job, step = "gpt", 7

    def __init__(self, kept):
        self.world_size = len(kept)
        self.kept = kept
        self.ranks = {
            number: SavedRank(number, each.state_bytes, None, each.header, self.step, ())
            for number, each in enumerate(kept)
        }
        self.bytes = 0

    @contextlib.contextmanager
    def read(self, wants, reporter=None):
        states = {}
        for rank, ranges in wants.items():
            source = self.kept[rank].segment.tensor
            states[rank] = torch.full_like(source, 0xEE)
            for offset, size in ranges:
                states[rank][offset : offset + size] = source[offset : offset + size]
                self.bytes += size
        yield states

    fill = StepReader.fill


def saved_by(world_size, make):
    """A step: `make(rank)` is each rank's state."""
    kept = []
    for rank in range(world_size):
        with being(rank, world_size):
            kept.append(snapshot(make(rank)))
    return Reader(kept)


def load(reader, state, rank, world_size):
    return load_resharded(state, reader, rank, world_size, lambda: None)


def placements_of(ndim):
    return st.one_of(st.just(Replicate()), *(st.just(Shard(dim)) for dim in range(ndim)))


@st.composite
def layouts(draw, shape):
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    if shape and len(mesh) == 2 and draw(st.booleans()):
        # As FSDP2 lays out what tensor parallelism has cut already.
        dim = draw(st.integers(0, len(shape) - 1))
        return mesh, [_StridedShard(dim, split_factor=mesh[1]), Shard(dim)]
    return mesh, [draw(placements_of(len(shape))) for _ in mesh]


@st.composite
def resharded(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    return shape, draw(layouts(shape)), draw(layouts(shape))


@settings(max_examples=60, deadline=None)
@given(resharded())
def test_any_cut_goes_into_any_other_bit_for_bit(case):
    shape, (old_mesh, old), (new_mesh, new) = case
    whole = torch.randn(shape)
    ranks = torch.Size(old_mesh).numel()
    reader = saved_by(ranks, lambda rank: {"w": cut(whole, mesh_of(old_mesh), old), "rank": rank})
    world = torch.Size(new_mesh).numel()
    for rank in range(world):
        with being(rank, world):
            wanted = cut(whole, mesh_of(new_mesh), new)
            state = {"w": cut(torch.zeros(shape), mesh_of(new_mesh), new), "rank": -1}
            own = load(reader, state, rank, world)
            assert bits(state["w"].to_local()) == bits(wanted.to_local())
            assert state["rank"] == own == (rank if rank < ranks else 0)


def test_only_what_a_rank_needs_is_read():
    whole = torch.randn(1024, 64)
    four = saved_by(4, lambda _: {"w": cut(whole, mesh_of([4]), [Shard(0)])})
    with being(1, 2):
        load(four, {"w": cut(torch.zeros(1024, 64), mesh_of([2]), [Shard(0)])}, 1, 2)
    assert four.bytes == whole.nbytes // 2
    copies = saved_by(4, lambda _: {"w": cut(whole, mesh_of([4]), [Replicate()])})
    with being(3, 8):
        load(copies, {"w": cut(torch.zeros(1024, 64), mesh_of([8]), [Shard(0)])}, 3, 8)
    assert copies.bytes == whole.nbytes // 8


def test_distributed_into_plain_and_back():
    whole = torch.randn(6, 4)
    cut_up = saved_by(4, lambda _: {"w": cut(whole, mesh_of([2, 2]), [Shard(0), Shard(1)])})
    plain = {"w": torch.zeros(6, 4)}
    assert load(cut_up, plain, 0, 1) == 0
    assert bits(plain["w"]) == bits(whole)
    # Ranks whose plain tensors differ: all have rank 0's, none a mixture.
    apart = saved_by(2, lambda rank: {"w": whole + rank, "own": torch.full((3,), float(rank))})
    for rank in range(4):
        with being(rank, 4):
            state = {"w": cut(torch.zeros(6, 4), mesh_of([4]), [Shard(0)]), "own": torch.zeros(3)}
            load(apart, state, rank, 4)
            assert bits(state["w"].to_local()) == bits(cut(whole, mesh_of([4]), [Shard(0)]).to_local())
            assert state["own"].tolist() == [1.0 if rank == 1 else 0.0] * 3


def network(mesh, placement, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    net[1].weight = net[1].weight  # a name that stays
    for layer in net:
        for name, parameter in list(layer.named_parameters()):
            if mesh is not None:
                setattr(layer, name, nn.Parameter(cut(parameter.detach(), mesh, [placement])))
    return net


def trained(mesh, placement, seed, step=True):
    net = network(mesh, placement, seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if step:
        torch.manual_seed(seed + 1)
        for parameter in net.parameters():
            gradient = torch.randn(parameter.shape)
            parameter.grad = gradient if mesh is None else cut(gradient, mesh, [placement])
        optimizer.step()
    return net, optimizer


class Average:
    def __init__(self, tensor):
        self.shadow = {"w": [tensor]}

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict):
        self.shadow = state_dict["shadow"]


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_modules_optimizers_and_objects_are_filled_as_in_any_load(stepped):
    def make(_):
        net, optimizer = trained(mesh_of([4]), Shard(0), 0)
        return {"model": net, "optimizer": optimizer, "ema": Average(net[0].weight.detach())}

    reader = saved_by(4, make)
    plain, judge = trained(None, None, 0)
    with being(1, 2):
        mesh = mesh_of([2])
        net, optimizer = trained(mesh, Shard(0), 9, step=stepped)
        state = {"model": net, "optimizer": optimizer, "ema": Average(net[0].weight.detach().clone())}
        load(reader, state, 1, 2)
        for one, whole in zip(net.parameters(), plain.parameters(), strict=True):
            assert bits(one.to_local()) == bits(cut(whole.detach(), mesh, [Shard(0)]).to_local())
            for name in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[one][name]
                assert bits(moment.to_local()) == bits(
                    cut(judge.state[whole][name], mesh, [Shard(0)]).to_local()
                )
            assert optimizer.state[one]["step"].item() == 1
        assert bits(state["ema"].shadow["w"][0].to_local()) == bits(net[0].weight.to_local())
    alone, other = trained(None, None, 5, step=stepped)
    load(reader, {"model": alone, "optimizer": other, "ema": Average(torch.zeros(8, 4))}, 0, 1)
    for one, whole in zip(alone.parameters(), plain.parameters(), strict=True):
        assert bits(one) == bits(whole)
        assert bits(other.state[one]["exp_avg"]) == bits(judge.state[whole]["exp_avg"])


def refused(reader, state, rank, world_size, *words):
    before = {
        key: bits(value.to_local() if isinstance(value, DTensor) else value) for key, value in state.items()
    }
    with pytest.raises(StateMismatchError) as caught:
        load(reader, state, rank, world_size)
    for word in words:
        assert word in str(caught.value)
    for key, value in state.items():
        assert bits(value.to_local() if isinstance(value, DTensor) else value) == before[key]


def test_what_does_not_fit_is_named_and_nothing_is_touched():
    whole = torch.randn(8, 4)
    reader = saved_by(
        4, lambda _: {"w": cut(whole, mesh_of([4]), [Shard(0)]), "b": cut(whole[0], mesh_of([4]), [Shard(0)])}
    )
    with being(0, 2):
        mesh = mesh_of([2])
        good = {"w": cut(torch.ones(8, 4), mesh, [Shard(0)]), "b": cut(torch.ones(4), mesh, [Shard(0)])}
        refused(
            reader,
            good | {"w": cut(torch.ones(6, 4), mesh, [Shard(0)])},
            0,
            2,
            "state['w']",
            "(6, 4)",
            "(8, 4)",
        )
        half = torch.ones(8, 4, dtype=torch.float16)
        refused(reader, good | {"w": cut(half, mesh, [Shard(0)])}, 0, 2, "state['w']", "float16", "float32")
        refused(reader, good | {"new": torch.ones(2)}, 0, 2, "state['new'] is not in the checkpoint")
        refused(reader, {"w": good["w"]}, 0, 2, "state['b'] is in the checkpoint, but not here")
        sums = DTensor.from_local(torch.ones(8, 4), mesh, [Partial()], run_check=False)
        refused(reader, good | {"w": sums}, 0, 2, "state['w']", "no box")
    refused(reader, {"w": torch.ones(8, 4), "b": torch.ones(3)}, 0, 1, "state['b']", "(3,)", "(4,)")


def test_a_rank_that_is_missing_leaves_a_hole_that_is_named():
    whole = torch.randn(8, 4)
    reader = saved_by(4, lambda rank: {"w": cut(whole, mesh_of([4]), [Shard(0)])} if rank != 2 else {"x": 1})
    refused(reader, {"w": torch.zeros(8, 4)}, 0, 1, "state['w']", "no rank has [4:6, 0:4]")


def test_what_was_no_box_is_not_guessed():
    whole = torch.randn(8, 4)
    apart = saved_by(2, lambda _: {"w": cut(whole, mesh_of([2]), [_StridedShard(0, split_factor=2)])})
    refused(apart, {"w": torch.zeros(8, 4)}, 0, 1, "state['w']", "_S(0, 2)")
    sums = saved_by(
        2, lambda _: {"w": DTensor.from_local(torch.ones(8, 4), mesh_of([2]), [Partial()], run_check=False)}
    )
    refused(sums, {"w": torch.zeros(8, 4)}, 0, 1, "state['w']", "P(sum)")


def test_headers_that_tell_no_box_are_read_only_where_there_is_nothing_to_know():
    whole = torch.randn(8, 4)
    for placement, good in ((Replicate(), True), (Shard(0), False)):
        reader = saved_by(2, lambda _, p=placement: {"w": cut(whole, mesh_of([2]), [p])})
        for rank in reader.ranks.values():
            rank.header.tensors[0].dtensor.ClearField("box")
            rank.header.tensors[0].dtensor.ClearField("mesh_digest")
        state = {"w": torch.zeros(8, 4)}
        if good:
            load(reader, state, 0, 1)
            assert bits(state["w"]) == bits(whole)
        else:
            refused(reader, state, 0, 1, "was not recorded")


def test_stages_that_call_their_tensors_alike_are_not_mixed():
    wholes = [torch.randn(8, 4), torch.randn(8, 4)]

    def stage(rank):
        return {"w": cut(wholes[rank // 2], mesh_of([2], [rank // 2 * 2, rank // 2 * 2 + 1]), [Shard(0)])}

    reader = saved_by(4, stage)
    refused(
        reader, {"w": torch.zeros(8, 4)}, 0, 1, "state['w']", "on one mesh on rank 0 and on another on rank 2"
    )
    for rank in range(4):
        with being(rank, 4):
            mesh = mesh_of([2], [rank // 2 * 2, rank // 2 * 2 + 1])
            state = {"w": cut(torch.zeros(8, 4), mesh, [Shard(1)])}
            load(reader, state, rank, 4)
            assert bits(state["w"].to_local()) == bits(cut(wholes[rank // 2], mesh, [Shard(1)]).to_local())
            # As many ranks, but one tensor over all of them.
            over_all = {"w": cut(torch.zeros(8, 4), mesh_of([4]), [Shard(0)])}
            refused(reader, over_all, rank, 4, "state['w']", "on one mesh on rank")


def left_out_of_tensor_parallelism(whole, drifted=()):
    """Four ranks, 2 x 2: `w` is cut both ways, `norm` over the first dimension alone, on a mesh for each of the second.

    `drifted`: rank → a bit of its part of the norm that is another one.
    """

    def make(rank):
        norm = cut(whole[:, 0].clone(), mesh_of([2], [rank % 2, rank % 2 + 2]), [Shard(0)])
        if rank in drifted:
            norm.to_local().view(torch.int32)[drifted[rank]] ^= 1
        return {"w": cut(whole, mesh_of([2, 2]), [Shard(0), Shard(1)]), "norm": norm}

    return saved_by(4, make)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("compared", [8, 64 << 20], ids=["piecewise", "at once"])
def test_what_tensor_parallelism_left_out_is_had_from_one_mesh(world_size, compared, monkeypatch):
    monkeypatch.setattr("fastcheck.reshard.COMPARED_BYTES_MAX", compared)
    whole = torch.randn(7, 4)
    whole[2, 0] = torch.nan  # equal bit for bit
    reader = left_out_of_tensor_parallelism(whole)
    for rank in range(world_size):
        with being(rank, world_size):
            mesh = mesh_of([world_size])
            state = {
                "w": cut(torch.zeros(7, 4), mesh, [Shard(0)]),
                "norm": cut(torch.zeros(7), mesh, [Shard(0)]),
            }
            load(reader, state, rank, world_size)
            assert bits(state["w"].to_local()) == bits(cut(whole, mesh, [Shard(0)]).to_local())
            assert bits(state["norm"].to_local()) == bits(
                cut(whole[:, 0].clone(), mesh, [Shard(0)]).to_local()
            )


@pytest.mark.parametrize("compared", [8, 64 << 20], ids=["piecewise", "at once"])
def test_meshes_that_differ_in_one_bit_are_named_and_nothing_is_touched(compared, monkeypatch):
    monkeypatch.setattr("fastcheck.reshard.COMPARED_BYTES_MAX", compared)
    reader = left_out_of_tensor_parallelism(torch.randn(7, 4), drifted={3: 2})
    whole = {"w": torch.zeros(7, 4), "norm": torch.zeros(7)}
    refused(
        reader, whole, 0, 1, "state['norm']", "on one mesh on rank 0 and on another on rank 3", "other values"
    )
    with being(0, 2):  # the part with that bit is another rank's
        mesh = mesh_of([2])
        state = {"w": cut(torch.zeros(7, 4), mesh, [Shard(0)]), "norm": cut(torch.zeros(7), mesh, [Shard(0)])}
        load(reader, state, 0, 2)


def test_a_mesh_that_lacks_a_part_is_no_copy():
    whole = torch.randn(8, 4)

    def make(rank):
        mesh = mesh_of([2], [rank % 2, rank % 2 + 2])
        return {"w": cut(whole, mesh, [Shard(0)])} if rank != 3 else {"x": 1}

    refused(saved_by(4, make), {"w": torch.zeros(8, 4)}, 0, 1, "state['w']", "on 2 meshes")


def test_the_same_mesh_with_ranks_in_another_order_is_another_place():
    whole = torch.randn(8, 4)
    reader = saved_by(2, lambda _: {"w": cut(whole, mesh_of([2]), [Shard(0)])})
    with being(0, 2):
        mesh = mesh_of([2], [1, 0])
        state = {"w": cut(torch.zeros(8, 4), mesh, [Shard(0)])}
        with pytest.raises(StateMismatchError, match=r"begins at \(4, 0\) here, at \(0, 0\)"):
            reader.kept[0].fill(copy.copy(state))
        load(reader, state, 0, 2)
        assert bits(state["w"].to_local()) == bits(whole[4:])


def test_plain_states_of_other_ranks_make_no_whole():
    reader = saved_by(2, lambda rank: {"w": torch.full((3,), float(rank))})
    for state in ({"w": torch.zeros(3)}, {"w": torch.zeros(6)}):
        with pytest.raises(WorldSizeError, match="saved by 2 ranks"):
            load(reader, state, 0, 1)
