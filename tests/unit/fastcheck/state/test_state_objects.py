"""Modules, optimizers, schedulers and the caller's own objects go through their state dicts."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.fastcheck.state_bytes import bits, same, snapshot
from torch import nn

from fastcheck import PartialLoadError, StateMismatchError


def model(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 5) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw plain amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), capturable=False, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_training_goes_on_bit_for_bit(name, stepped):
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer, 3)
    kept = snapshot({"model": net, "optimizer": optimizer})

    again = model(seed=9)
    other = OPTIMIZERS[name](again.parameters())
    if stepped:
        train(again, other, 2, seed=77)
    kept.fill({"model": again, "optimizer": other})
    kept.scribble()

    assert same(dict(again.state_dict()), dict(net.state_dict()))
    assert same(other.state_dict(), optimizer.state_dict())
    assert train(again, other, 3) == train(net, optimizer, 3)
    assert same(dict(again.state_dict()), dict(net.state_dict()))


def test_lbfgs_whose_state_is_lists_of_tensors_comes_back():
    def run(net, optimizer):
        torch.manual_seed(3)
        data = torch.randn(6, 4)

        def closure():
            optimizer.zero_grad()
            loss = net(data).pow(2).mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    run(net, optimizer)
    kept = snapshot({"m": net, "o": optimizer})
    again = model(1)
    other = torch.optim.LBFGS(again.parameters(), max_iter=4)
    kept.fill({"m": again, "o": other})
    kept.scribble()
    assert run(again, other) == run(net, optimizer)


def test_existing_state_tensors_are_filled_in_place_and_step_stays_a_cpu_float32():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 2)
    kept = snapshot({"o": optimizer})
    held = {id(t): t for s in optimizer.state.values() for t in s.values()}
    before = {i: bits(t) for i, t in held.items()}
    train(net, optimizer, 2)
    kept.fill({"o": optimizer})
    now = {id(t): t for s in optimizer.state.values() for t in s.values()}
    assert now.keys() == held.keys()
    assert {i: bits(t) for i, t in now.items()} == before
    step = next(iter(optimizer.state.values()))["step"]
    assert step.dtype is torch.float32
    assert step.device.type == "cpu"
    assert step.item() == 2


def test_float32_state_of_bfloat16_parameters_is_not_rounded_on_the_way():
    class Master(torch.optim.SGD):
        """Keeps a float32 copy beside each parameter, as mixed-precision optimizers do."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("master", p.float())
                    master.sub_(p.grad.float(), alpha=group["lr"])
                    p.copy_(master)

    def make():
        net = nn.Linear(4, 3).to(torch.bfloat16)
        return net, Master(net.parameters(), lr=0.0123)

    net, optimizer = make()
    net(torch.randn(2, 4, dtype=torch.bfloat16)).float().pow(2).sum().backward()
    optimizer.step()
    kept = snapshot({"m": net, "o": optimizer})
    again, other = make()
    kept.fill({"m": again, "o": other})
    assert same(other.state_dict(), optimizer.state_dict())
    assert other.state[again.weight]["master"].dtype is torch.float32


def test_parameter_groups_keep_their_own_settings():
    def make():
        net = model()
        return net, torch.optim.AdamW(
            [
                {"params": [net[0].weight], "weight_decay": 0.5},
                {"params": [net[3].weight, net[3].bias], "lr": 0.25},
            ]
        )

    net, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.125
    train(net, optimizer, 1)
    again, other = make()
    snapshot({"o": optimizer}).fill({"o": other})
    assert other.param_groups[0]["lr"] == 0.125
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    assert other.param_groups[0]["params"][0] is again[0].weight
    assert same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (lambda n: torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9), "another kind of optimizer"),
        (lambda n: torch.optim.AdamW([{"params": [p]} for p in n.parameters()]), "groups"),
        (lambda n: torch.optim.AdamW(list(n.parameters())[1:]), "5 parameters here, 6 in the checkpoint"),
        (lambda n: torch.optim.AdamW(reversed(list(n.parameters()))), "belongs to a parameter of shape"),
        (lambda n: nn.Linear(1, 1), "'weight'] is not in the checkpoint"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_untouched(other, word):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    kept = snapshot({"o": optimizer, "t": torch.ones(1)})
    target = other(model(1))
    before = copy.deepcopy(target.state_dict())
    state = {"o": target, "t": torch.zeros(1)}
    with pytest.raises(StateMismatchError) as caught:
        kept.fill(state)
    assert word in str(caught.value)
    assert same(dict(target.state_dict()), dict(before))
    assert state["t"].item() == 0


def test_a_stepped_optimizer_of_another_shape_is_refused():
    net, wide = model(), model(width=9)
    optimizer, other = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(wide.parameters())
    train(net, optimizer, 1)
    train(wide, other, 1)
    with pytest.raises(StateMismatchError) as caught:
        snapshot({"o": optimizer}).fill({"o": other})
    assert "['o']['state'][0]['exp_avg'] has shape (9, 4) here, (8, 4) in the checkpoint" in str(caught.value)


SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_schedulers_go_on_where_they_were(name):
    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(1.0) if name == "plateau" else scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = make()
    advance(optimizer, scheduler, 2)
    kept = snapshot({"o": optimizer, "s": scheduler})
    other, again = make()
    kept.fill({"o": other, "s": again})
    assert again.state_dict() == scheduler.state_dict()
    assert advance(other, again, 5) == advance(optimizer, scheduler, 5)
    if name == "multistep":
        assert again.milestones == scheduler.milestones


class Extra(nn.Module):
    """Tied weights, buffers of both kinds, extra state, a frozen parameter, a missing one."""

    def __init__(self, note: object = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_parameter("absent", None)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.note = note

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def test_modules_with_tied_weights_buffers_and_extra_state():
    net = Extra({"seen": 3, "table": torch.arange(6.0)})
    with torch.no_grad():
        net.embed.weight.normal_()
        net.mean += 2
        net.frozen += 1
    kept = snapshot({"m": net})
    again = Extra()
    weight = again.embed.weight
    kept.fill({"m": again})
    kept.scribble()
    assert again.embed.weight is weight
    assert again.head.weight is weight
    assert bits(weight) == bits(net.embed.weight)
    assert again.mean.tolist() == [2, 2, 2]
    assert again.frozen.tolist() == [1, 1]
    assert not again.frozen.requires_grad
    assert again.note["seen"] == 3
    assert again.note["table"].tolist() == [0, 1, 2, 3, 4, 5]
    embed = next(p for p in [weight])
    assert len({embed.data_ptr(), again.head.weight.data_ptr()}) == 1


def test_a_module_that_does_not_fit_is_refused_untouched():
    net = model()
    kept = snapshot({"m": net})
    other = model(1, width=9).to(torch.float64)
    before = {k: bits(v) for k, v in other.state_dict().items()}
    with pytest.raises(StateMismatchError) as caught:
        kept.fill({"m": other})
    text = "\n".join(caught.value.mismatches)
    assert "state['m']['0.weight'] has shape (9, 4) here, (8, 4) in the checkpoint" in text
    assert "state['m']['3.bias'] has dtype torch.float64 here, torch.float32 in the checkpoint" in text
    assert {k: bits(v) for k, v in other.state_dict().items()} == before


def test_a_module_on_the_meta_device_is_refused_instead_of_silently_left_empty():
    with torch.device("meta"):
        empty = model()
    with pytest.raises(TypeError, match="meta device"):
        snapshot({"m": model()}).fill({"m": empty})


class Grabber(nn.Module):
    """Puts whatever it is given in the place of its parameter, buffer and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.weight.data = state_dict[prefix + "weight"]
        self.mean = state_dict[prefix + "mean"]


def test_no_parameter_or_buffer_stays_a_view_of_the_segment():
    net = Grabber()
    with torch.no_grad():
        net.weight += 3
        net.mean += 4
    kept = snapshot({"m": net})
    again = Grabber()
    kept.fill({"m": again})
    kept.scribble()
    assert again.weight.tolist() == [3] * 4
    assert again.mean.tolist() == [4] * 4


def test_modules_that_swap_their_tensors_on_load_do_not_keep_the_segment():
    kept = snapshot({"m": model()})
    again = model(4)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        kept.fill({"m": again})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    kept.scribble()
    assert same(dict(again.state_dict()), dict(model().state_dict()))


class Counter:
    """The caller's own kind of object, which keeps what it is given."""

    def __init__(self) -> None:
        self.state = {"n": 0}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        if state_dict.get("n") == 13:
            raise RuntimeError("unlucky")
        self.state = state_dict


def test_own_objects_get_copies_that_they_may_keep():
    counter = Counter()
    counter.state = {"n": 5, "ema": [torch.arange(3.0)], 7: (None, b"x")}
    kept = snapshot({"c": counter})
    again = Counter()
    kept.fill({"c": again})
    kept.scribble()
    assert same(again.state, counter.state)


def test_an_object_may_be_the_whole_state():
    counter = Counter()
    counter.state = {"n": 5}
    again = Counter()
    snapshot(counter).fill(again)
    assert again.state == {"n": 5}


def test_an_object_that_refuses_its_state_is_named_and_the_mixed_state_said():
    counter = Counter()
    counter.state = {"n": 13}
    with pytest.raises(PartialLoadError, match=r"state\['c'\].*unlucky") as caught:
        snapshot({"c": counter}).fill({"c": Counter()})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_module_with_a_load_of_its_own_gets_copies_too():
    class Renaming(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.given = None

        def load_state_dict(self, state_dict, strict=True, assign=False):
            self.given = state_dict
            return super().load_state_dict(state_dict, strict, assign)

    net, again = Renaming(), Renaming()
    kept = snapshot({"m": net})
    kept.fill({"m": again})
    kept.scribble()
    assert bits(again.given["inner.weight"]) == bits(net.inner.weight) == bits(again.inner.weight)
