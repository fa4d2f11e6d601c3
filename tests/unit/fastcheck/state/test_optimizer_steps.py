"""Hyper-parameters as the step used them: hooks that note them, and leave no trace when they are not wanted."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from fastcheck.state.flatten import flatten
from fastcheck.state.layouts import Layouts
from fastcheck.state.optimizer_steps import StepHook
from fastcheck_proto.v1 import layout_pb2 as pb


def make(kind=torch.optim.AdamW, **settings):
    net = nn.Linear(3, 2)
    return net, kind(net.parameters(), **({"lr": 0.5} | settings))


def train(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def steps(state, layouts) -> list[pb.OptimizerStep]:
    return list(flatten(state, layouts).layout.optimizer_steps)


def hooks(optimizer) -> int:
    return len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_load_state_dict_post_hooks)


def test_the_learning_rate_of_the_step_is_recorded_not_the_schedulers_next():
    net, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state, layouts = {"m": net, "o": optimizer}, Layouts()
    layouts.watch(state)
    for number in range(1, 4):
        train(net, optimizer)
        used = optimizer.param_groups[0]["lr"]
        scheduler.step()
        (step,) = steps(state, layouts)
        assert (step.lr, step.step, step.observed) == (used, number, True)
        assert step.lr != optimizer.param_groups[0]["lr"]


def test_a_tensor_learning_rate_is_noted_before_it_is_changed_in_place():
    net, optimizer = make(lr=torch.tensor(0.5), foreach=False)
    layouts = Layouts()
    layouts.watch([optimizer])
    train(net, optimizer)
    optimizer.param_groups[0]["lr"].fill_(9)
    (step,) = steps({"m": net, "o": optimizer}, layouts)
    assert (step.lr, step.observed) == (0.5, True)


def test_an_optimizer_first_seen_at_a_save_is_observed_from_the_next_step_on():
    net, optimizer = make()
    train(net, optimizer)
    state, layouts = {"m": net, "o": optimizer}, Layouts()
    assert [s.observed for s in steps(state, layouts)] == [False]
    train(net, optimizer)
    assert [s.observed for s in steps(state, layouts)] == [True]
    assert hooks(optimizer) == 2


def test_what_was_loaded_since_or_stepped_past_the_hook_is_not_called_observed():
    net, optimizer = make()
    state, layouts = {"m": net, "o": optimizer}, Layouts()
    layouts.watch(state)
    train(net, optimizer)
    for s in optimizer.state.values():
        s["step"] += 1
    assert [(s.observed, s.step) for s in steps(state, layouts)] == [(False, 2)]
    train(net, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [s.observed for s in steps(state, layouts)] == [False]


def test_parameters_that_were_left_out_of_a_step_are_a_class_of_their_own():
    net, optimizer = make()
    state, layouts = {"m": net, "o": optimizer}, Layouts()
    layouts.watch(state)
    train(net, optimizer)
    net.bias.grad = None
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    found = steps(state, layouts)
    assert [(s.step, s.observed, s.lr) for s in found] == [(2, True, 0.25), (1, False, 0.25)]
    chunk = flatten(state, layouts).layout.chunks[0]
    assert {(r.optimizer_step, r.elements) for r in chunk.runs if r.role} == {(1, 6), (2, 2)}


def test_a_group_without_gradients_keeps_what_its_own_last_step_used():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(
        [{"params": [net.weight]}, {"params": [net.bias], "lr": 2.0}], lr=1.0, momentum=0.9
    )
    layouts = Layouts()
    layouts.watch(optimizer)
    train(net, optimizer)
    net.bias.grad = None
    for group in optimizer.param_groups:
        group["lr"] *= 10
    optimizer.step()
    found = steps({"m": net, "o": optimizer}, layouts)
    assert [(s.lr, s.observed, s.step) for s in found] == [(10.0, True, 0), (2.0, True, 0)]


class Quiet(torch.optim.AdamW):
    pass


class Other(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "settings", "wanted"),
    [
        (torch.optim.Adam, {}, pb.OPTIMIZER_KIND_ADAM),
        (torch.optim.Adam, {"decoupled_weight_decay": True}, pb.OPTIMIZER_KIND_ADAMW),
        (torch.optim.AdamW, {}, pb.OPTIMIZER_KIND_ADAMW),
        (Quiet, {}, pb.OPTIMIZER_KIND_ADAMW),
        (Other, {}, pb.OPTIMIZER_KIND_UNSPECIFIED),
        (torch.optim.SGD, {"momentum": 0.9}, pb.OPTIMIZER_KIND_SGD),
        (torch.optim.NAdam, {}, pb.OPTIMIZER_KIND_UNSPECIFIED),
        (torch.optim.RMSprop, {"momentum": 0.9}, pb.OPTIMIZER_KIND_UNSPECIFIED),
    ],
)
def test_the_kind_is_known_of_torchs_own_optimizers_alone(kind, settings, wanted):
    net, optimizer = make(kind, **settings)
    train(net, optimizer)
    assert [s.kind for s in steps({"m": net, "o": optimizer}, Layouts())] == [wanted]


@pytest.mark.parametrize(
    ("kind", "settings", "wanted"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}, pb.OPTIMIZER_KIND_ADAM),
        (torch.optim.AdamW, {}, pb.OPTIMIZER_KIND_ADAMW),
        (torch.optim.SGD, {"momentum": 0.9}, pb.OPTIMIZER_KIND_SGD),
        (torch.optim.RMSprop, {"momentum": 0.9}, pb.OPTIMIZER_KIND_UNSPECIFIED),
        (torch.optim.NAdam, {}, pb.OPTIMIZER_KIND_UNSPECIFIED),
    ],
)
def test_the_kind_of_a_state_dict_is_guessed_from_its_settings(kind, settings, wanted):
    net, optimizer = make(kind, **settings)
    train(net, optimizer)
    (step,) = steps({"m": net.state_dict(), "o": optimizer.state_dict()}, Layouts())
    assert (step.kind, step.observed) == (wanted, False)


def test_all_settings_travel():
    net, optimizer = make(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, amsgrad=True, maximize=True)
    train(net, optimizer)
    (step,) = steps({"o": optimizer}, Layouts())
    assert (step.beta1, step.beta2, step.eps, step.weight_decay) == (0.8, 0.95, 1e-6, 0.3)
    assert step.amsgrad and step.maximize and not step.nesterov
    net, optimizer = make(torch.optim.SGD, momentum=0.9, nesterov=True)
    (step,) = steps({"o": optimizer}, Layouts())
    assert (step.momentum, step.dampening, step.nesterov, step.amsgrad) == (0.9, 0, True, False)


def test_close_takes_the_hooks_off_and_later_saves_put_none_back():
    net, optimizer = make()
    layouts = Layouts()
    state = {"m": net, "o": optimizer}
    flatten(state, layouts)
    assert hooks(optimizer) == 2
    layouts.close()
    assert hooks(optimizer) == 0
    flatten(state, layouts)
    assert hooks(optimizer) == 0


def test_hooks_go_with_a_layouts_object_that_nobody_closed():
    _, optimizer = make()
    layouts = Layouts()
    layouts.watch(optimizer)
    del layouts
    gc.collect()
    assert hooks(optimizer) == 0


def test_hooks_keep_no_optimizer_alive_and_a_new_one_is_seen_anew():
    layouts = Layouts()
    for _ in range(3):
        net, optimizer = make()
        train(net, optimizer)
        assert [s.observed for s in steps({"o": optimizer}, layouts)] == [False]
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    assert len(layouts._recorder._hooks) == 1
    assert len(layouts._recorder._handles) == 2


class Whole(torch.optim.AdamW):
    """Pickles all that it has, hooks included."""

    def __getstate__(self):
        return dict(self.__dict__)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Whole])
def test_optimizers_with_hooks_can_be_copied_and_pickled(kind):
    net, optimizer = make(kind)
    layouts = Layouts()
    layouts.watch(optimizer)
    train(net, optimizer)
    # Programs do pickle their optimizers (torch.save): our hooks must not be what fails then.
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.step()
        assert [s.observed for s in steps({"o": other}, layouts)] == [False]
    assert [s.observed for s in steps({"o": optimizer}, layouts)] == [True]


def test_a_hook_never_raises_into_training():
    net, optimizer = make()
    hook = StepHook()
    optimizer.register_step_post_hook(hook)
    train(net, optimizer)
    assert hook.groups

    class Strange(dict):
        def __getitem__(self, key):
            raise RuntimeError(key)

    hook(type("Broken", (), {"param_groups": [Strange()]})(), (), {})
    assert hook.groups == []
