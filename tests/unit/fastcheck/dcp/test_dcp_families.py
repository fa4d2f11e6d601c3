"""Under data parallelism a parameter and its moments are saved by one rank, the same at every step, and ranks share."""

import dataclasses

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from fastcheck.dcp.save_plans import group_families, savable_tensors

RANKS = 4


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for width in (40, 30, 20, 40, 10, 30)))
    optimizer = torch.optim.AdamW(model.parameters())
    for layer in model:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def plans_of(state, **options):
    """What the coordinator's planner made of the plans of ranks that hold all the same."""
    planners = [DefaultSavePlanner(**options) for _ in range(RANKS)]
    local = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state, None, rank == 0)
        plan = planner.create_local_plan()
        local.append(dataclasses.replace(plan, storage_data=savable_tensors(plan)))
    return planners[0].create_global_plan(local)[0]


def state_of(*, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(*model_and_optimizer(), options=options)
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def state():
    return state_of()


def ranks_of(plans):
    """Name → the ranks that save it."""
    found: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            found.setdefault(item.index.fqn, []).append(rank)
    return found


@pytest.mark.parametrize("flat", [False, True])
def test_a_parameter_and_its_moments_are_on_one_rank_and_nothing_is_lost(flat):
    state = state_of(flat=flat)
    before = plans_of(state)
    after = group_families(before)
    was, now = ranks_of(before), ranks_of(after)
    assert now.keys() == was.keys()
    assert all(len(ranks) == 1 for ranks in now.values())
    apart = 0
    for name in state["model"]:
        slots = ("exp_avg", "exp_avg_sq", "step")
        family = [f"model.{name}", *(f"optimizer.state.{name}.{slot}" for slot in slots)]
        assert len({now[fqn][0] for fqn in family}) == 1, name
        apart += len({was[fqn][0] for fqn in family}) > 1
    assert apart, "DCP leaves them together by now: this is not needed any more"
    sizes = [sum(item.tensor_storage_size() or 0 for item in plan.items) for plan in after]
    assert max(sizes) < 1.5 * sum(sizes) / RANKS


def test_every_step_is_dealt_out_alike(state):
    one, other = (ranks_of(group_families(plans_of(state))) for _ in range(2))
    assert one == other
    assert list(one) == list(other)


def test_what_is_together_stays_where_it_is(state):
    lowest = plans_of(state, dedup_save_to_lowest_rank=True)
    assert group_families(lowest) == lowest
    assert {rank for ranks in ranks_of(group_families(lowest)).values() for rank in ranks} == {0}


def test_a_planner_that_loses_what_ranks_say_keeps_its_own_way(state):
    plans = [dataclasses.replace(plan, storage_data=None) for plan in plans_of(state)]
    assert group_families(plans) == plans


def test_a_tensor_goes_only_to_a_rank_that_has_it(state):
    """Ranks 2 and 3 hold half of the model, as in a pipeline of two stages with two replicas each."""
    names = list(state["model"])

    def stage(part):
        optimizer = {"state": {name: state["optimizer"]["state"][name] for name in part}}
        return {"model": {name: state["model"][name] for name in part}, "optimizer": optimizer}

    stages = [stage(names[:6]), stage(names[6:])]
    planners = [DefaultSavePlanner() for _ in range(RANKS)]
    local = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner(stages[rank // 2], None, rank == 0)
        plan = planner.create_local_plan()
        local.append(dataclasses.replace(plan, storage_data=savable_tensors(plan)))
    dealt = group_families(planners[0].create_global_plan(local)[0])
    for rank, plan in enumerate(dealt):
        assert {item.index.fqn for item in plan.items} <= set(local[rank].storage_data.fqns)
    assert ranks_of(dealt).keys() == {fqn for plan in local for fqn in plan.storage_data.fqns}


def test_moments_by_number_are_together():
    model, optimizer = model_and_optimizer()
    now = ranks_of(
        group_families(plans_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    )
    for number in range(len(model.state_dict())):
        assert (
            len({now[f"optimizer.state.{number}.{slot}"][0] for slot in ("exp_avg", "exp_avg_sq", "step")})
            == 1
        )
