"""Plans that a planner leaves out since they are as before, and steps that lack something their metadata names."""

import dataclasses

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from fastcheck import InvalidArgumentError
from fastcheck.dcp.checkpointer_pool import CheckpointerOptions, checkpointer_of, close_job
from fastcheck.dcp.save_plans import check_complete, complete_plans


def planned(state):
    """The plans of one rank and the metadata."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    return planner.create_global_plan([planner.create_local_plan()])


def test_a_plan_as_before_that_was_never_seen_is_refused():
    plans, _ = planned({"a": torch.ones(3)})
    as_before = [SavePlan([], usable=False)] * 2
    with pytest.raises(InvalidArgumentError, match="plan of rank 0 .* enable_plan_caching"):
        complete_plans("never-seen", as_before)
    two = [plans[0], dataclasses.replace(plans[0], items=[])]
    assert complete_plans("seen", two) == two
    assert complete_plans("seen", as_before) == two
    assert complete_plans("seen", [two[1], as_before[1]]) == [two[1], two[1]]


def test_what_metadata_names_and_nobody_writes_is_refused_by_name():
    state = {"model": {"w": torch.ones(3), "scale": torch.tensor(1.0)}, "epoch": 3}
    (plan,), metadata = planned(state)
    written = [item.index for item in plan.items]
    check_complete(metadata, written)
    check_complete(metadata, [MetadataIndex(index.fqn) for index in written])
    for absent in written:
        rest = [index for index in written if index != absent]
        with pytest.raises(InvalidArgumentError, match=f"lacks '{absent.fqn}'"):
            check_complete(metadata, rest)
    elsewhere = [dataclasses.replace(written[0], offset=torch.Size([1])), *written[1:]]
    with pytest.raises(InvalidArgumentError, match="lacks"):
        check_complete(metadata, elsewhere)


NOWHERE = CheckpointerOptions(address="unix:///nowhere.sock")


def test_two_savers_at_once():
    try:
        with checkpointer_of("gpt", 0, 1, NOWHERE) as seat:
            with (
                pytest.raises(
                    InvalidArgumentError, match="rank 0 of job 'gpt' is just being saved by another"
                ),
                checkpointer_of("gpt", 0, 1, NOWHERE),
            ):
                raise AssertionError("both have it")
            with checkpointer_of("bert", 0, 1, NOWHERE) as other:
                assert other is not seat
        with checkpointer_of("gpt", 0, 1, NOWHERE) as again:
            assert again is seat
    finally:
        close_job("gpt")
        close_job("bert")
