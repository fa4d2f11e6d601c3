"""What belongs to what is found in every form that an optimizer comes in; what is not clear is not guessed."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.fastcheck.state_bytes import same, snapshot
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastcheck.state.collect import collect
from fastcheck.state.flatten import flatten
from fastcheck.state.header import parse
from fastcheck.state.optimizers import read_sources
from fastcheck.state.tensor_groups import find_groups, in_order
from fastcheck_proto.v1 import layout_pb2 as pb

P, LOW = pb.ROLE_PARAM, pb.ROLE_LOW_PRECISION_PARAM
M, V, MAX, BUF, NONE = (
    pb.ROLE_EXP_AVG,
    pb.ROLE_EXP_AVG_SQ,
    pb.ROLE_MAX_EXP_AVG_SQ,
    pb.ROLE_MOMENTUM,
    pb.ROLE_UNSPECIFIED,
)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(6, 4, dtype=next(net.parameters()).dtype)).float().pow(2).mean().backward()
        optimizer.step()


def trained(make=torch.optim.AdamW, **settings):
    net = model()
    optimizer = make(net.parameters(), **({"lr": 1e-2} | settings))
    train(net, optimizer)
    return net, optimizer


def named_groups(state) -> dict[str, dict[str, int]]:
    """By the name of each group's first member: the names and roles of all of them."""
    found = collect(state)
    names: dict[int, str] = {}
    for name, slot in zip(found.names, found.record_slots, strict=True):
        names.setdefault(slot, name)
    return {
        names[group.members[0].slot]: {names[m.slot]: m.role for m in group.members}
        for group in find_groups(found, read_sources(found))
    }


PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]


def test_an_optimizer_object_knows_its_parameters_by_identity():
    net, optimizer = trained()
    groups = named_groups({"model": net, "optimizer": optimizer})
    assert groups == {
        f"model.{name}": {
            f"model.{name}": P,
            f"optimizer.state.{i}.exp_avg": M,
            f"optimizer.state.{i}.exp_avg_sq": V,
        }
        for i, name in enumerate(PARAMETERS)
    }


def test_identity_does_not_depend_on_where_things_stand_in_the_state():
    net, optimizer = trained()
    state = {"deep": [{"o": optimizer}], "w": [p.detach() for p in reversed(list(net.parameters()))]}
    groups = named_groups(state)
    assert [sorted(g.values()) for g in groups.values()] == [[P, M, V]] * 6
    assert groups["w.5"] == {"w.5": P, "deep.0.o.state.0.exp_avg": M, "deep.0.o.state.0.exp_avg_sq": V}


def test_moments_are_grouped_without_their_parameter_when_it_is_not_in_the_state():
    _, optimizer = trained()
    assert [list(g.values()) for g in named_groups({"o": optimizer}).values()] == [[M, V]] * 6


@pytest.mark.parametrize(
    ("make", "settings", "roles"),
    [
        (torch.optim.Adam, {"amsgrad": True}, [P, M, V, MAX]),
        (torch.optim.AdamW, {"fused": True}, [P, M, V]),
        (torch.optim.SGD, {"momentum": 0.9}, [P, BUF]),
        (torch.optim.SGD, {}, [P]),
        (torch.optim.Adagrad, {}, [P, NONE]),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}, [P, BUF, NONE, NONE]),
        (torch.optim.NAdam, {}, [P, M, V]),
        (torch.optim.Adafactor, {}, None),
        (torch.optim.LBFGS, {}, None),
    ],
)
def test_every_optimizer_forms_groups_of_what_has_its_parameters_size(make, settings, roles):
    net = model()
    optimizer = make(net.parameters(), **({"lr": 1e-2} | settings))
    loss = lambda: net(torch.ones(2, 4)).pow(2).mean()  # noqa: E731
    loss().backward()
    optimizer.step(loss) if make is torch.optim.LBFGS else optimizer.step()
    state = {"model": net, "optimizer": optimizer}
    groups = named_groups(state)
    assert list(groups) == [f"model.{name}" for name in PARAMETERS]
    if roles:
        assert [list(g.values()) for g in groups.values()] == [roles] * 6
    kept = snapshot(state)
    kept.fill({"model": model(3), "optimizer": make(model(3).parameters(), lr=1.0)})


def test_a_tensor_of_another_size_or_kind_joins_no_group():
    weight = torch.nn.Parameter(torch.randn(6))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight] = {
        "same": torch.ones(2, 3),
        "fewer": torch.ones(5),
        "complex": torch.ones(6, dtype=torch.complex64),
        "low": torch.ones(6, dtype=torch.bfloat16),
        "flags": torch.ones(6, dtype=torch.bool),
        "list": [torch.ones(6)],
        "itself": weight.detach(),
    }
    one = torch.nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [one]})
    optimizer.state[one] = {"step": torch.tensor(4.0), "exp_avg": torch.ones(1)}
    groups = named_groups({"w": weight, "o": optimizer, "one": one})
    assert set(groups["w"]) == {"w", "o.state.0.same", "o.state.0.low", "o.state.0.flags"}
    assert set(groups["one"]) == {"one", "o.state.1.exp_avg"}


def test_state_dicts_are_matched_in_order_by_shape_and_buffers_skipped():
    net, optimizer = trained()
    wanted = named_groups({"model": net, "optimizer": optimizer})
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    assert named_groups(state) == wanted
    assert named_groups({"model": net, "optimizer": optimizer.state_dict()}) == wanted
    assert named_groups(copy.deepcopy(state)) == wanted


def test_a_modules_buffers_are_known_whatever_their_names():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("scale", torch.ones(4))

    net = nn.Sequential(Scaled(), Scaled())
    optimizer = torch.optim.AdamW(net.parameters())
    (net[0].weight.sum() + net[1].weight.sum()).backward()
    optimizer.step()
    assert set(named_groups({"m": net, "o": optimizer.state_dict()})) == {"m.0.weight", "m.1.weight"}
    unclear = named_groups({"m": net.state_dict(), "o": optimizer.state_dict()})
    assert [list(g.values()) for g in unclear.values()] == [[M, V]] * 2


def test_state_dicts_with_weight_decay_groups_are_matched_group_by_group():
    net = model()
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    train(net, optimizer)
    wanted = named_groups({"model": net, "optimizer": optimizer})
    assert len(wanted) == 6
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    assert named_groups(state) == wanted
    layout = flatten(state).layout
    assert [s.weight_decay for s in layout.optimizer_steps] == [0.01, 0.0]
    roles = {(r.optimizer_step, r.row_elements > 0) for c in layout.chunks for r in c.runs if r.role == P}
    assert roles == {(1, True), (2, False)}


def test_a_choice_in_the_order_leaves_moments_without_a_parameter():
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    for frozen in range(3):
        chosen = [p for i, p in enumerate(net.parameters()) if i != frozen]
        optimizer = torch.optim.AdamW(chosen)
        train(net, optimizer)
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        assert [list(g.values()) for g in named_groups(state).values()] == [[M, V]] * 2
        state = {"model": net, "optimizer": optimizer}
        assert [list(g.values()) for g in named_groups(state).values()] == [[P, M, V]] * 2


@given(st.lists(st.integers(1, 3), max_size=5), st.lists(st.integers(1, 3), max_size=7))
def test_order_is_believed_exactly_when_there_is_one_way(wanted, have):
    ways: list[list[int]] = [[]]
    for size in wanted:
        ways = [[*w, i] for w in ways for i in range(w[-1] + 1 if w else 0, len(have)) if have[i] == size]
    made = in_order([(w,) for w in wanted], [(h,) for h in have])
    assert made == (ways[0] if len(ways) == 1 else None)


def test_names_are_matched_where_only_some_of_them_are_here():
    net, optimizer = trained()
    names = ["0.weight", "3.bias"]
    whole = get_optimizer_state_dict(net, optimizer)
    part = {**whole, "state": {name: whole["state"][name] for name in names}}
    state = {"model": {name: net.state_dict()[name] for name in names}, "optimizer": part}
    groups = named_groups(state)
    assert set(groups) == {f"model.{name}" for name in names}
    assert all(list(g.values()) == [P, M, V] for g in groups.values())
    assert all(name.removeprefix("model.") in other for name, g in groups.items() for other in g)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_state_dicts_by_name(flat):
    net, optimizer = trained(weight_decay=0.25)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"a": {"optim": get_optimizer_state_dict(net, optimizer, options=options)}, "b": net.state_dict()}
    groups = named_groups(state)
    assert set(groups) == {f"b.{name}" for name in PARAMETERS}
    assert all(list(g.values()) == [P, M, V] for g in groups.values())
    assert all(name.removeprefix("b.") in other for name, g in groups.items() for other in g)
    (step,) = flatten(state).layout.optimizer_steps
    assert (step.kind, step.step, step.observed) == (pb.OPTIMIZER_KIND_ADAMW, 1, False)
    assert (step.lr, step.beta1, step.weight_decay) == (1e-2, 0.9, 0.25)


def test_masters_and_their_copies_are_paired_by_order_shape_and_value():
    net = model()
    masters = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    low = model().to(torch.bfloat16)
    with torch.no_grad():
        for p, master in zip(low.parameters(), masters, strict=True):
            p.copy_(master)
    state = {"model": low, "master": masters, "optimizer": optimizer}
    groups = named_groups(state)
    assert len(groups) == 6
    for i, name in enumerate(PARAMETERS):
        assert groups[f"master.{i}"] == {
            f"master.{i}": P,
            f"model.{name}": LOW,
            f"optimizer.state.{i}.exp_avg": M,
            f"optimizer.state.{i}.exp_avg_sq": V,
        }
    dicts = {"model": low.state_dict(), "master": masters, "optimizer": optimizer.state_dict()}
    assert named_groups(dicts) == groups
    with torch.no_grad():
        low[3].weight[0, 0] += 1
    assert LOW not in named_groups(state)["master.4"].values()
    assert LOW in named_groups(state)["master.5"].values()


def test_masters_inside_the_optimizers_state_are_the_parameter():
    net = model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    for p in net.parameters():
        optimizer.state[p]["master_param"] = p.detach().float()
    groups = named_groups({"model": net, "optimizer": optimizer})
    assert list(groups["optimizer.state.0.master_param"].values()) == [P, LOW, M, V]


def test_tied_weights_and_two_optimizers_over_one_parameter_have_one_group_each():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    one, two = torch.optim.AdamW(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 4)).sum().backward()
    one.step()
    two.step()
    groups = named_groups({"model": net, "one": one, "two": two})
    members = Counter(name for g in groups.values() for name in g)
    assert set(members.values()) == {1}
    assert list(groups["model.0.weight"].values()) == [P, M, V]
    assert list(groups["two.state.0.momentum_buffer"].values()) == [BUF]


@pytest.mark.parametrize(
    "broken",
    [
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": [3]},
        {"state": {0: 5}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"exp_avg": 3, 7: torch.ones(2)}}, "param_groups": [{"params": [0, 0, 1]}]},
        {"state": {0: {"step": torch.ones(3)}}, "param_groups": [{"params": [None]}]},
        {"state": {0: {"step": float("nan")}}, "param_groups": [{"params": [0], "lr": "x", "betas": 3}]},
        {"state": {0: {"step": -5}}, "param_groups": [{"params": [0], "betas": (None, "y"), "lr": 2**2000}]},
        {"param_groups.": 3, "param_groups.a.": 4, "param_groups.a.lr": [], "state.a.exp_avg": torch.ones(2)},
        {"param_groups.a.b.lr": torch.ones(2), "state.": torch.ones(3)},
        {
            "param_groups.a.lr": 10**5000,
            "param_groups.a.betas": ([], {}),
            "state.a.step": torch.ones(1).byte(),
        },
        {"state": {0: {"step": torch.zeros(1, dtype=torch.float8_e5m2)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"step": torch.zeros(1, dtype=torch.bits8)}}, "param_groups": [{"params": [0]}]},
    ],
)
def test_what_only_looks_like_an_optimizer_is_saved_like_anything_else(broken):
    state = {"o": broken, "m": {"w": torch.ones(2), "a": torch.ones(2)}}
    kept = snapshot(state)
    target = copy.deepcopy(state)
    target["m"]["w"].zero_()
    kept.fill(target)
    assert target["m"]["w"].tolist() == [1, 1]


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("form", ["objects", "dicts", "by name", "flattened"])
def test_fully_sharded_training_in_every_form(mesh, form):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    state = {
        "objects": lambda: {"m": net, "o": optimizer},
        "dicts": lambda: {"m": net.state_dict(), "o": optimizer.state_dict()},
        "by name": lambda: {"m": get_model_state_dict(net), "o": get_optimizer_state_dict(net, optimizer)},
        "flattened": lambda: {
            "m": net.state_dict(),
            "o": get_optimizer_state_dict(net, optimizer, options=options),
        },
    }[form]()
    groups = named_groups(state)
    assert set(groups) == {"m.0.weight", "m.0.bias", "m.2.weight", "m.2.bias"}
    assert all(list(g.values()) == [P, M, V] for g in groups.values())


def test_cut_local_shards_of_dtensors_come_back_in_place(mesh):
    def make(seed):
        torch.manual_seed(seed)
        net = nn.Linear(1200, 1000)
        fully_shard(net, mesh=mesh)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2)

    net, optimizer = make(0)
    net(torch.randn(2, 1200)).sum().backward()
    optimizer.step()
    state = {"m": net, "o": optimizer}
    flat = flatten(state)
    assert any(r.piece_offsets for r in parse(flat.header, flat.state_bytes).tensors)
    kept = snapshot(state)
    again, other = make(1)
    kept.fill({"m": again, "o": other})
    kept.scribble()
    assert same(again.weight.to_local().detach(), net.weight.to_local().detach())
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert same(optimizer.state[p]["exp_avg"].to_local(), other.state[q]["exp_avg"].to_local())
