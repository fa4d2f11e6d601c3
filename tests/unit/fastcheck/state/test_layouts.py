"""A state that is collected along the trace of the last one is laid out as if it had been collected anew."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck import UnsupportedStateError
from fastcheck.copier import Copier
from fastcheck.segments import anonymous
from fastcheck.state import layouts as layouts_module
from fastcheck.state.flatten import flatten, uncollected
from fastcheck.state.layouts import Layouts


def make() -> dict:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    weight = net[0].weight.detach()
    return {
        "net": net,
        "optimizer": optimizer,
        "list": [1, 2.5, "x", None, True, b"y", {3: {}}, (), []],
        "tied": [weight, weight[:2], torch.zeros(0), torch.zeros(0)],
        "strided": torch.randn(6, 4).t(),
        "number": torch.tensor(1.0),
        "large": torch.randn(1_500_000),
    }


def memory(flat) -> torch.Tensor:
    segment = anonymous(flat.state_bytes)
    segment.tensor.fill_(255)  # of an earlier state
    Copier(1).copy(flat, segment.tensor)
    return segment.tensor[: flat.state_bytes]


def check(state: dict, layouts: Layouts) -> None:
    """Laid out with what is known of earlier states, and without."""
    known, new = flatten(state, layouts), flatten(state)
    assert known.header == new.header
    assert list(known.layout.chunks) == list(new.layout.chunks)
    assert torch.equal(memory(known), memory(new))


@pytest.fixture
def collected(monkeypatch):
    """How many states were collected anew by layouts that know others."""
    seen: list[object] = []
    collect = layouts_module.collect

    def spy(state):
        seen.append(state)
        return collect(state)

    monkeypatch.setattr(layouts_module, "collect", spy)
    return seen


def test_a_training_loop_is_collected_once(collected):
    state, layouts = make(), Layouts()
    for step in range(4):
        state["net"](torch.randn(5, 8)).sum().backward()
        state["optimizer"].step()
        state["list"][:6] = [step, -0.0 if step % 2 else 0.0, f"{step}", 10**30 * step, False, bytes(step)]
        state["number"] = torch.tensor(float(step))
        flatten(state, layouts)
    assert len(collected) == 1
    check(state, layouts)


def change_type(state: dict) -> None:
    state["list"][0] = torch.ones(2)


def plain_for_tensor(state: dict) -> None:
    state["number"] = 1.0


def kind_of_plain(state: dict) -> None:
    state["list"][0], state["list"][3] = "text", math.nan


def other_key(state: dict) -> None:
    state["list"][6] = {True: {}}


def longer(state: dict) -> None:
    state["list"].append(1)


def order(state: dict) -> None:
    state["number"] = state.pop("number")
    state["large"] = state.pop("large")


def shape(state: dict) -> None:
    state["number"] = torch.ones(2)


def dtype(state: dict) -> None:
    state["number"] = torch.tensor(1.0, dtype=torch.float64)


def stride(state: dict) -> None:
    state["strided"] = state["strided"].contiguous()


def untied(state: dict) -> None:
    state["tied"][0] = state["tied"][0].clone()


def tied(state: dict) -> None:
    state["tied"][1] = state["list"][6][3]["t"] = torch.ones(2, 8)


def shared(state: dict) -> None:
    state["more"] = [state["number"], state["number"]]


def conjugate(state: dict) -> None:
    state["number"] = torch.tensor(1 + 2j).conj()


def empty(state: dict) -> None:
    state["tied"][2] = torch.zeros(0, 3)


def container(state: dict) -> None:
    state["list"][7] = []


def fewer(state: dict) -> None:
    state["optimizer"].state.clear()


CHANGES = [
    change_type, plain_for_tensor, kind_of_plain, other_key, longer, order, shape, dtype, stride, untied, tied,
    shared, conjugate, empty, container, fewer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_noticed(change):
    state, layouts = make(), Layouts()
    flatten(state, layouts)
    change(state)
    for _ in range(3):
        check(state, layouts)
    other = make()
    check(other, layouts)


def test_tensors_that_come_to_share_memory_or_stop_to_are_noticed():
    one, layouts = torch.arange(6.0), Layouts()
    for pair in ([one, one], [one, one.clone()], [one.clone(), one], [one, one.detach()], [one[:3], one[3:]]):
        for _ in range(2):
            check({"a": pair[0], "b": pair[1], "c": pair}, layouts)


def replace(tensors: list, i: int, j: int) -> None:
    tensors[i] = tensors[i].clone()


def move(tensors: list, i: int, j: int) -> None:
    tensors[i].data = tensors[i].data.clone()


def swap(tensors: list, i: int, j: int) -> None:
    tensors[i].data, tensors[j].data = tensors[j].data, tensors[i].data


def alias(tensors: list, i: int, j: int) -> None:
    tensors[i] = tensors[j]


def look(tensors: list, i: int, j: int) -> None:
    tensors[i] = tensors[j].detach()


def share(tensors: list, i: int, j: int) -> None:
    tensors[i].data = tensors[j].data


def turn(tensors: list, i: int, j: int) -> None:
    tensors[i].t_()


def reshape(tensors: list, i: int, j: int) -> None:
    if tensors[i].numel() % 2 == 0:
        tensors[i].data = tensors[i].data.contiguous().view(2, -1)


def reinterpret(tensors: list, i: int, j: int) -> None:
    tensors[i].data = tensors[i].data.contiguous().view(torch.int32)


def cut(tensors: list, i: int, j: int) -> None:
    tensors[i].data = tensors[i].data[:1]


def train(tensors: list, i: int, j: int) -> None:
    tensors[i].add_(1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [replace, move, swap, alias, look, share, turn, reshape, reinterpret, cut, train]
            ),
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_the_same_objects_at_the_same_addresses_are_still_looked_at(changes):
    layouts = Layouts()
    tensors = [torch.arange(4.0).reshape(2, 2) + i for i in range(4)]
    for change in (None, None, *changes):
        if change is not None:
            change[0](tensors, *change[1:])
        check({"t": tensors}, layouts)


def test_a_state_is_known_again_when_two_take_turns():
    one, other = {"a": torch.ones(3), "b": torch.zeros(2)}, {"a": torch.ones(3), "c": torch.zeros(2)}
    layouts = Layouts()
    first = flatten(one, layouts).layout
    for state in (other, one, other, one):
        check(state, layouts)
    assert flatten(one, layouts).layout is first, "laid out anew"


def test_an_error_is_the_same_along_a_trace_and_leaves_nothing_behind():
    state, layouts = make(), Layouts()
    flatten(state, layouts)
    for bad in (print, 10**200_000, "\ud800", torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        state["list"][0] = bad
        with pytest.raises(UnsupportedStateError, match=r"state\['list'\]\[0\]"):
            flatten(state, layouts)
        state["list"][0] = 5
        check(state, layouts)


def test_nothing_of_the_callers_is_kept_alive():
    state, layouts = make(), Layouts()
    flatten(state, layouts)
    held = weakref.ref(state["net"][0].weight), weakref.ref(state["optimizer"])
    del state
    gc.collect()
    assert [ref() for ref in held] == [None, None]


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_rests_while_a_state_is_walked_and_is_then_as_it_was(was_on):
    assert gc.isenabled()
    try:
        if not was_on:
            gc.disable()
        with contextlib.suppress(KeyError), uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
