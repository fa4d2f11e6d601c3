"""A rank's description of itself: what is written is read, and nothing else is believed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck.dcp.metadata import Description, Item, read_description, write_description
from fastcheck.errors import CorruptError, UnsupportedStateError

ITEMS = (
    Item("model.w", "shard", (2, 0), (2, 3), (8, 3), "bfloat16", True),
    Item("model.b", "tensor", (), (), (), "float32", False),
    Item("epoch", "bytes"),
)


@pytest.mark.parametrize(
    "planner_data",
    [
        None,
        {},
        {"model.w": ("model", "w"), "groups.0.lr": ("groups", 0, "lr")},
        {"a": [1, 2.5, None, True, "x"]},
        7,
    ],
)
def test_what_is_written_is_read(planner_data):
    assert read_description(write_description(ITEMS, planner_data)) == Description(ITEMS, planner_data)


@given(st.dictionaries(st.text(), st.lists(st.text() | st.integers(0, 99), min_size=1).map(tuple)))
def test_any_flattening_is_kept(mapping):
    assert read_description(write_description((), mapping)).planner_data == mapping


@pytest.mark.parametrize(
    "planner_data",
    [
        object(),
        {"a": object()},
        {"a": (1.5,)},
        {1: ("a",)},
        {"a": {1, 2}},
        float("nan"),
        {"a": b"x"},
        {"a": (1, True)},
    ],
)
def test_planner_data_that_is_not_plain_is_refused(planner_data):
    with pytest.raises(UnsupportedStateError, match="planner_data.*nothing is pickled"):
        write_description((), planner_data)


def item(**changes):
    return list(ITEMS[0]._replace(**changes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "[" * 100_000,
        "{}",
        json.dumps({"schema": 1, "items": [[1, 2]]}),
        json.dumps({"schema": 1, "items": [item(kind="pickle")]}),
        json.dumps({"schema": 1, "items": [item(kind=["shard"])]}),
        json.dumps({"schema": 1, "items": [item(fqn=7)]}),
        json.dumps({"schema": 1, "items": [item(offsets=[-1, 0])]}),
        json.dumps({"schema": 1, "items": [item(offsets=[7, 0])]}),
        json.dumps({"schema": 1, "items": [item(sizes=[2])]}),
        json.dumps({"schema": 1, "items": [item(sizes=[True, 3])]}),
        json.dumps({"schema": 1, "items": [item(size=[2**63, 3])]}),
        json.dumps({"schema": 1, "items": [item(offsets=[0] * 65, sizes=[1] * 65, size=[1] * 65)]}),
        json.dumps({"schema": 1, "items": [item(requires_grad=1)]}),
        json.dumps({"schema": 1, "items": [], "mapping": []}),
        json.dumps({"schema": 1, "items": [], "mapping": {"a": "b"}}),
        json.dumps({"schema": 1, "items": [], "mapping": {"a": [1.5]}}),
        json.dumps({"schema": 1, "items": [], "mapping": {"a": []}}),
        b"bytes",
        None,
    ],
)
def test_what_contradicts_itself_is_refused(text):
    with pytest.raises(CorruptError):
        read_description(text)


def test_another_version_says_so():
    with pytest.raises(CorruptError, match="format version 2"):
        read_description(json.dumps({"schema": 2, "items": []}))
