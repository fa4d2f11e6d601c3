"""What cannot be saved or does not fit is named, all of it, before anything was changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.fastcheck.state_bytes import same, snapshot

from fastcheck import StateMismatchError, UnsupportedStateError
from fastcheck.state.flatten import flatten
from fastcheck.state.header import DEPTH_MAX


class Odd(torch.Tensor):
    pass


class Nester:
    def state_dict(self):
        return {"inner": torch.nn.Linear(1, 1)}

    def load_state_dict(self, state_dict):
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (print, "builtin_function"),
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (bytearray(b"x"), "bytearray"),
        (1j, "complex"),
        (torch.nn.Linear, "type"),
        (torch.float32, "torch.dtype"),
        (np.int64(3), ".item()"),
        (np.zeros(3), "torch.from_numpy"),
        ("\ud800", "Unicode"),
        pytest.param(1 << 400_000, "digits", id="a huge integer"),
        (torch.zeros(2).to_sparse(), "layout"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2).as_subclass(Odd), "Odd"),
        (torch.nn.parameter.UninitializedParameter(), "uninitialised"),
        (Nester(), "itself"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_saved_is_named_by_its_path(value, word):
    with pytest.raises(UnsupportedStateError) as caught:
        flatten({"optimizer": {"state": [{"fn": value}]}})
    assert isinstance(caught.value, TypeError)
    assert "state['optimizer']['state'][0]['fn']" in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_tensors_are_refused():
    with pytest.raises(UnsupportedStateError, match="nested"):
        flatten({"n": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])})
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedStateError, match="quantized"):
        flatten({"q": quantized})


@pytest.mark.parametrize("key", [1.5, (1, 2), b"x"])
def test_keys_of_other_kinds_are_refused(key):
    with pytest.raises(UnsupportedStateError, match=r"state\['a'\] has the key"):
        flatten({"a": {key: 1}})


def test_cycles_and_bottomless_trees_are_refused():
    loop: list = []
    loop.append({"again": loop})
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        flatten({"x": loop})
    deep: list = []
    for _ in range(DEPTH_MAX):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="levels deep"):
        flatten(deep)


def test_one_container_in_two_places_is_no_cycle():
    shared = {"t": torch.ones(1)}
    assert len(flatten([shared, shared]).pieces) == 1


@pytest.mark.parametrize("root", [5, None, "x", print])
def test_a_root_that_could_never_be_filled_is_refused_at_save(root):
    with pytest.raises(UnsupportedStateError):
        flatten(root)


def test_a_root_tuple_is_filled_unless_it_would_have_to_be_rebuilt():
    kept = snapshot((torch.ones(2), [1]))
    tensor, values = torch.zeros(2), [0]
    kept.fill((tensor, values))
    assert tensor.tolist() == [1, 1]
    assert values == [1]
    with pytest.raises(UnsupportedStateError, match="put it into a dict"):
        snapshot((torch.ones(2), 1)).fill((tensor, 0))


def test_all_mismatches_are_listed_and_nothing_is_changed():
    saved = {
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(2),
        "kind": torch.ones(2),
        "gone": torch.ones(1),
        "fits": torch.ones(4),
        "number": 5,
        "text": "x",
        "tuple": (1, 2),
        "list": [torch.ones(1)],
        "deep": {"a": [{"b": torch.ones(3)}]},
    }
    state = {
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2, dtype=torch.float64),
        "kind": [1],
        "new": torch.zeros(1),
        "fits": torch.zeros(4),
        "number": 1,
        "text": 3,
        "tuple": (1, 2, 3),
        "list": [],
        "deep": {"a": [{"b": torch.zeros(4)}]},
    }
    before = {"fits": torch.zeros(4), "number": 1}
    with pytest.raises(StateMismatchError) as caught:
        snapshot(saved).fill(state)
    assert isinstance(caught.value, ValueError)
    assert set(caught.value.mismatches) == {
        "state['new'] is not in the checkpoint",
        "state['gone'] is in the checkpoint, but not here",
        "state['shape'] has shape (3, 2) here, (2, 3) in the checkpoint",
        "state['dtype'] has dtype torch.float64 here, torch.float32 in the checkpoint",
        "state['kind'] is a list here, a tensor in the checkpoint",
        "state['text'] is an int here, a str in the checkpoint",
        "state['tuple'] has 3 items here, 2 in the checkpoint",
        "state['list'] has 0 items here, 1 in the checkpoint",
        "state['deep']['a'][0]['b'] has shape (4,) here, (3,) in the checkpoint",
    }
    assert same({k: state[k] for k in before}, before)


def test_the_message_shows_at_most_ten():
    with pytest.raises(StateMismatchError) as caught:
        snapshot({str(i): 1 for i in range(30)}).fill({})
    assert len(caught.value.mismatches) == 30
    assert str(caught.value).count("\n") == 11
    assert "and 20 more" in str(caught.value)


def test_what_cannot_be_filled_is_refused_before_anything_is_touched():
    state = {"a": torch.zeros(1), "b": {1, 2}}
    with pytest.raises(UnsupportedStateError, match=r"state\['b'\]"):
        snapshot({"a": torch.ones(1), "b": [1, 2]}).fill(state)
    assert state["a"].item() == 0


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (lambda: torch.zeros(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["sparse", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_cannot_be_filled_is_named_and_nothing_is_changed(target, word):
    state = {"a": torch.zeros(2), "deep": {"b": target()}}
    with pytest.raises(UnsupportedStateError, match=r"state\['deep'\]\['b'\].*" + word):
        snapshot({"a": torch.ones(2), "deep": {"b": torch.ones(2)}}).fill(state)
    assert not state["a"].any()


def test_memory_shared_here_but_not_in_the_checkpoint_is_a_mismatch_only_if_the_bytes_differ():
    tied = torch.zeros(3)
    snapshot({"a": torch.ones(3), "b": torch.ones(3)}).fill({"a": tied, "b": tied})
    assert tied.tolist() == [1, 1, 1]
    with pytest.raises(StateMismatchError, match="shares its memory"):
        snapshot({"a": torch.ones(3), "b": torch.zeros(3)}).fill({"a": tied, "b": tied})
    expanded = torch.zeros(1).expand(3)
    with pytest.raises(StateMismatchError, match="expanded"):
        snapshot({"a": torch.arange(3.0)}).fill({"a": expanded})


def test_a_failing_state_dict_of_the_callers_raises_as_it_is():
    class Broken(Nester):
        def state_dict(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        flatten({"x": Broken()})
