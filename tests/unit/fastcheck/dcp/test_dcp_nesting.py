"""The tree behind flat names, for the layout: the codec is told what it is told of the nested state."""

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from fastcheck.dcp.metadata import nested
from fastcheck.state.collect import collect
from fastcheck.state.layouts import Layouts
from fastcheck_proto.v1 import layout_pb2 as pb


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75))
    for _ in range(3):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    return model, optimizer


def told(state_dict):
    """The layout of what a planner makes of a state dict: the roles of all runs, and the optimizer's steps."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, None, True)
    tensors = {fqn: t for fqn, t in planner.state_dict.items() if isinstance(t, torch.Tensor)}
    layouts = Layouts()
    layout = layouts.arrange(
        collect({"tensors": tensors}), like=nested(planner.state_dict, planner.mappings, tensors)
    ).layout
    runs = [run for chunk in layout.chunks for run in chunk.runs]
    return sorted((run.role, run.unit) for run in runs if run.role), list(layout.optimizer_steps)


def check(roles, steps):
    # Two weights and two biases, each with its moments in a unit of its own.
    found = [role for role, _ in roles]
    for role in (pb.ROLE_PARAM, pb.ROLE_EXP_AVG, pb.ROLE_EXP_AVG_SQ):
        assert found.count(role) == 4
    assert len({unit for _, unit in roles}) == 4
    (step,) = steps
    assert (step.kind, step.lr, step.beta1, step.beta2, step.step) == (
        pb.OPTIMIZER_KIND_ADAMW,
        0.25,
        0.5,
        0.75,
        3,
    )


def test_names_as_get_state_dict_gives_them():
    model, optimizer = trained()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    check(*told({"model": model_state, "optimizer": optimizer_state}))


def test_numbers_as_an_optimizer_itself_gives_them():
    model, optimizer = trained()
    check(*told({"app": {"model": model.state_dict(), "optim": optimizer.state_dict()}}))


def test_what_another_rank_saves_is_no_part_of_it():
    flat = {"model.w": torch.ones(4), "model.v": torch.ones(4)}
    own = {"model.w": flat["model.w"]}
    tree = nested(flat, {"model.w": ("model", "w"), "model.v": ("model", "v"), "gone": ("gone",)}, own)
    assert tree["model"]["w"] is own["model.w"]
    assert tree["model"]["v"] is flat["model.v"]
    assert set(tree) == {"model"}


def test_paths_that_contradict_each_other_do_no_harm():
    one, two = torch.ones(1), torch.ones(1)
    tree = nested({}, {"a": ("a",), "a.b": ("a", "b")}, {"a": one, "a.b": two})
    assert tree["a"] is one
