"""DCP's metadata from what each rank says: as DCP's own planner would have made it, and nothing is believed."""

import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from fastcheck.dcp.metadata import Item, index_of, write_description
from fastcheck.dcp.writer import Assignment, _describe
from fastcheck.errors import CorruptError, LoadFailedError, SaveTimeoutError, StateMismatchError
from fastcheck.handle import SaveHandle
from fastcheck.state.flatten import flatten
from fastcheck.state.header import parse
from fastcheck_proto.v1 import trainer_pb2 as pb


def header(items, tensors, planner_data=None):
    flat = flatten({"dcp": write_description(items, planner_data), "tensors": dict(enumerate(tensors))})
    return parse(flat.header, flat.state_bytes)


def shard(fqn, low, rows, whole=8, **changes):
    return Item(fqn, "shard", (low, 0), (rows, 3), (whole, 3), "float32")._replace(**changes)


def test_as_the_default_planner_makes_it():
    state = {
        "model": {"w": torch.ones(4, 3), "b": torch.zeros(()), "h": torch.ones(2).bfloat16()},
        "epoch": 3,
        "l": [1],
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    items = [_describe(item) for item in plan.items]
    tensors = [
        state["model"][i.fqn[6:]] if i.kind == "tensor" else torch.zeros(9, dtype=torch.uint8) for i in items
    ]
    found = index_of({0: header(items, tensors, plan.planner_data)}, "step 1")
    assert found.metadata.state_dict_metadata == metadata.state_dict_metadata
    assert found.metadata.planner_data == metadata.planner_data
    assert found.find(MetadataIndex("model.w", torch.Size([0, 0]))).record.bytes == 48
    assert found.find(MetadataIndex("epoch")).record.bytes == 9


def test_boxes_of_several_ranks_in_their_order_and_an_empty_one_behind():
    found = index_of(
        {
            1: header([shard("w", 8, 0)], [torch.ones(0, 3)]),
            0: header([shard("w", 0, 5), shard("w", 5, 3)], [torch.ones(5, 3), torch.ones(3, 3)]),
        },
        "step 1",
    )
    chunks = found.metadata.state_dict_metadata["w"].chunks
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [
        ((0, 0), (5, 3)),
        ((5, 0), (3, 3)),
        ((8, 0), (0, 3)),
    ]
    assert found.find(MetadataIndex("w", torch.Size([5, 0]))).rank == 0


@pytest.mark.parametrize("empty_first", [True, False])
def test_an_empty_box_does_not_hide_the_one_that_begins_there(empty_first):
    boxes = [
        header([shard("w", 0, 0)], [torch.ones(0, 3)]),
        header([shard("w", 0, 8)], [torch.ones(8, 3)]),
    ]
    found = index_of(dict(enumerate(boxes if empty_first else boxes[::-1])), "step 1")
    assert found.find(MetadataIndex("w", torch.Size([0, 0]))).record.bytes == 96


def test_what_ranks_saved_alike_is_there_once():
    one = header(
        [shard("w", 0, 8), Item("epoch", "bytes")], [torch.ones(8, 3), torch.zeros(2, dtype=torch.uint8)]
    )
    found = index_of({0: one, 1: one}, "step 1")
    assert len(found.metadata.state_dict_metadata["w"].chunks) == 1
    assert found.find(MetadataIndex("w", torch.Size([0, 0]))).rank == 0


@pytest.mark.parametrize(
    ("items", "tensors"),
    [
        ([shard("w", 0, 5)], []),
        ([shard("w", 0, 5)], [torch.ones(4, 3)]),
        ([Item("epoch", "bytes")], [torch.ones(4)]),
        ([shard("w", 0, 5, dtype="float3")], [torch.ones(5, 3)]),
        ([shard("w", 0, 5), shard("w", 5, 3, whole=9)], [torch.ones(5, 3), torch.ones(3, 3)]),
        ([shard("w", 0, 5), shard("w", 0, 3)], [torch.ones(5, 3), torch.ones(3, 3)]),
        ([shard("w", 0, 5), Item("w", "bytes")], [torch.ones(5, 3), torch.ones(1, dtype=torch.uint8)]),
    ],
)
def test_what_contradicts_itself_is_refused(items, tensors):
    with pytest.raises(CorruptError):
        index_of({0: header(items, tensors)}, "step 1")


def test_what_dcp_did_not_save_is_said_to_be_such():
    flat = flatten({"model": {"w": torch.ones(3)}})
    with pytest.raises(LoadFailedError, match=r"step 1 was not saved by torch.distributed.checkpoint"):
        index_of({0: parse(flat.header, flat.state_bytes)}, "step 1")


def test_a_part_that_was_not_saved():
    found = index_of({0: header([shard("w", 0, 8)], [torch.ones(8, 3)])}, "step 1")
    with pytest.raises(CorruptError, match="'w' at"):
        found.find(MetadataIndex("w", torch.Size([4, 0])))


def test_errors_survive_the_way_between_ranks():
    error = pickle.loads(pickle.dumps(StateMismatchError(["a is not b", "c is not d"])))
    assert error.mismatches == ("a is not b", "c is not d")
    assert str(error) == str(StateMismatchError(["a is not b", "c is not d"]))
    assert pickle.loads(pickle.dumps(Assignment(1, 4))) == Assignment(1, 4)


def test_waiting_for_copies_is_not_waiting_for_the_commit():
    handle = SaveHandle(7)
    with pytest.raises(SaveTimeoutError, match="not replicated"):
        handle.wait_replicated(timeout=0.01)
    handle._absorb(pb.SaveProgress(state=pb.SAVE_STATE_REPLICATED))
    assert handle.wait_replicated(timeout=0) is handle
    assert not handle.done


def test_the_package_is_not_imported_by_fastcheck_and_fsspec_finds_it():
    code = "import sys, fastcheck; fastcheck.Checkpointer; print('fastcheck.dcp' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    module, _, name = project["project"]["entry-points"]["fsspec.specs"]["fastcheck"].partition(":")
    from importlib import import_module  # noqa: PLC0415

    assert getattr(import_module(module), name).protocol == "fastcheck"
