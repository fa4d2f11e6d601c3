"""Real optimizers of torch, step by step: predicted, nearly free, exact; and left to the delta when they lie."""

from __future__ import annotations

import copy

import pytest
import torch
from codec_helpers import (
    LOW,
    MOMENTUM,
    PARAM,
    V_MAX,
    M,
    V,
    decoded,
    encode_chunk,
    round_trip,
    run,
    whole,
)  # fmt: skip

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.chunk_plan import Unit
from fastcheckd.codec.decoder import reverse
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.format import parse

ADAM_STATE = [("exp_avg", M), ("exp_avg_sq", V), ("max_exp_avg_sq", V_MAX)]


class Training:
    """A small model that learns; one chunk for each parameter."""

    def __init__(self, make, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 16))
        self.optimizer = make(self.model.parameters())
        self.data = torch.randn(64, 64)
        self.wanted = torch.randn(64, 16)

    def step(self, spoil=None):
        self.optimizer.zero_grad()
        (self.model(self.data + 0.1 * torch.randn(64, 64)) - self.wanted).square().mean().backward()
        if spoil is not None:
            self.model[0].weight.grad.view(-1)[::97] = spoil
        self.optimizer.step()

    def snapshot(self):
        """(unit, bytes) of each weight matrix, as its last step left it."""
        group = self.optimizer.param_groups[0]
        found = []
        for layer in (self.model[0], self.model[2]):
            state = self.optimizer.state[layer.weight]
            members = [(PARAM, layer.weight.detach())]
            members += [(role, state[name]) for name, role in ADAM_STATE if name in state]
            if state.get("momentum_buffer") is not None:
                members.append((MOMENTUM, state["momentum_buffer"]))
            n = layer.weight.numel()
            runs = tuple(run(4 * n * i, n, role=role) for i, (role, _) in enumerate(members))
            data = b"".join(t.contiguous().numpy().tobytes() for _, t in members)
            found.append((Unit(runs, hyper(self.optimizer, group, state)), data))
        return found


def hyper(optimizer, group, state):
    if isinstance(optimizer, torch.optim.SGD):
        return pb.OptimizerStep(
            kind=pb.OPTIMIZER_KIND_SGD, lr=group["lr"], momentum=group["momentum"], dampening=group["dampening"],
            weight_decay=group["weight_decay"], nesterov=group["nesterov"], maximize=group["maximize"],
        )  # fmt: skip
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
    return pb.OptimizerStep(
        kind=pb.OPTIMIZER_KIND_ADAMW if decoupled else pb.OPTIMIZER_KIND_ADAM, lr=group["lr"],
        beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], weight_decay=group["weight_decay"],
        maximize=group["maximize"], amsgrad=group["amsgrad"], step=int(state["step"]),
    )  # fmt: skip


def changed(unit, **fields):
    step = copy.deepcopy(unit.step)
    for name, value in fields.items():
        setattr(step, name, value)
    return Unit(unit.runs, step)


def cost(unit, new, base):
    """Codecs, and bytes per element of each run in the order of the section: w m v [max v], or w and momentum."""
    codecs = round_trip(new, base, whole(unit))
    section = parse(encode_chunk(new, base, whole(unit)).payload)[1][0]
    planes = [section.planes[i : i + 4] for i in range(0, len(section.planes), 4)]
    return codecs, [sum(len(plane.body) for plane in four) / section.elements for four in planes]


ADAMS = {
    "adam": (torch.optim.Adam, {}),
    "adam with decay": (torch.optim.Adam, {"weight_decay": 0.05}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw without decay": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "maximize": (torch.optim.Adam, {"maximize": True, "lr": 1e-4}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "one by one": (torch.optim.AdamW, {"foreach": False}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "fused amsgrad": (torch.optim.Adam, {"fused": True, "amsgrad": True, "weight_decay": 0.01}),
    "betas": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-5}),
    "slow": (torch.optim.AdamW, {"lr": 1e-6}),
}


@pytest.mark.parametrize("name", ADAMS)
def test_adam_is_predicted_step_by_step(name):
    kind, options = ADAMS[name]
    training = Training(lambda parameters: kind(parameters, **({"lr": 2e-3} | options)))
    training.step()
    before = training.snapshot()
    for _ in range(3):
        training.step()
        after = training.snapshot()
        for (_, base), (unit, new) in zip(before, after, strict=True):
            codecs, bytes_of = cost(unit, new, base)
            assert codecs == {"adam"}
            w, _, v, *v_max = bytes_of
            assert w < 0.15
            assert v < 0.35
            assert v_max in ([], [0])
        before = after


SGDS = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.1},
    "decay": {"momentum": 0.9, "weight_decay": 0.01},
    "nesterov with decay": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"momentum": 0.9, "maximize": True, "lr": 1e-3},
    "foreach": {"momentum": 0.9, "foreach": True},
    "one by one": {"momentum": 0.9, "foreach": False},
    "fused": {"momentum": 0.9, "fused": True},
}


@pytest.mark.parametrize("name", SGDS)
def test_sgd_is_predicted_step_by_step(name):
    training = Training(lambda parameters: torch.optim.SGD(parameters, **({"lr": 0.05} | SGDS[name])))
    training.step()
    before = training.snapshot()
    for _ in range(3):
        training.step()
        after = training.snapshot()
        for (_, base), (unit, new) in zip(before, after, strict=True):
            codecs, bytes_of = cost(unit, new, base)
            assert codecs == {"sgd"}
            assert bytes_of[0] < 0.15
        before = after


def steps(make, count=4, warm=3):
    training = Training(make)
    for _ in range(warm):
        training.step()
    before = training.snapshot()
    for _ in range(count):
        training.step()
    return before[0], training.snapshot()[0]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("factor", [0.5, 0.99, 1.3, 0.0, 100.0])
def test_a_rate_that_a_scheduler_moved_is_fitted(make, factor):
    (_, base), (unit, new) = steps(make, count=1)
    codecs, right = cost(unit, new, base)
    fitted_codecs, fitted = cost(changed(unit, lr=unit.step.lr * factor), new, base)
    assert fitted_codecs == codecs == {"adam" if make is adamw else "sgd"}
    # The rate is right to some 1e-7, which moves single roundings.
    assert fitted[0] < right[0] + 0.1
    assert fitted[1:] == right[1:]


@pytest.mark.parametrize(
    "wrong", [{"beta1": 0.88}, {"beta2": 0.99}, {"eps": 1e-3}, {"weight_decay": 0}, {"step": 1}]
)
def test_what_does_not_explain_the_numbers_is_left_to_the_delta(wrong):
    (_, base), (unit, new) = steps(adamw, count=1)
    assert round_trip(new, base, whole(changed(unit, **wrong))) == {"delta"}


def test_two_steps_at_once_are_left_to_the_delta():
    (_, base), (unit, new) = steps(adamw, count=2)
    assert round_trip(new, base, whole(unit)) == {"delta"}
    (_, base), (unit, new) = steps(sgd, count=2)
    assert round_trip(new, base, whole(unit)) == {"delta"}


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), -float("inf"), 1e38, 1e-45])
def test_gradients_without_sense_come_back_too(make, spoil):
    training = Training(make)
    training.step()
    _, base = training.snapshot()[0]
    training.step(spoil)
    unit, new = training.snapshot()[0]
    round_trip(new, base, whole(unit))
    # And the step after: all of it is NaN by then.
    training.step()
    unit, newer = training.snapshot()[0]
    round_trip(newer, new, whole(unit))


def test_the_first_step_from_nothing():
    training = Training(adamw)
    training.step()
    unit, new = training.snapshot()[0]
    round_trip(new, None, whole(unit))
    round_trip(new, bytes(len(new)), whole(unit))


@pytest.mark.parametrize(
    ("torch_type", "dtype"), [(torch.bfloat16, DType.BFLOAT16), (torch.float16, DType.FLOAT16)]
)
def test_a_low_precision_copy_of_a_master_costs_nothing(torch_type, dtype):
    (unit0, base), (unit1, new) = steps(adamw, count=1)
    n = unit0.runs[0].elements

    def with_copy(unit, data):
        master = torch.frombuffer(bytearray(data[: 4 * n]), dtype=torch.float32)
        low = master.to(torch_type).view(torch.int16).numpy().tobytes()
        return Unit((*unit.runs, run(len(data), n, dtype, LOW)), unit.step), data + low

    (_, base_too), (unit_too, new_too) = with_copy(unit0, base), with_copy(unit1, new)
    assert round_trip(new_too, base_too, whole(unit_too)) == {"adam", "rounded"}
    plain = encode_chunk(new, base, whole(unit1)).payload
    payload = encode_chunk(new_too, base_too, whole(unit_too)).payload
    assert len(payload) == len(plain) + 40
    back = reverse(payload, base_too, new_too)
    assert decoded(back, new_too, len(base_too)) == base_too
    # Rounded otherwise, it is a run like any other.
    spoilt = bytearray(new_too)
    spoilt[-1] ^= 1
    assert "rounded" not in round_trip(bytes(spoilt), base_too, whole(unit_too))
