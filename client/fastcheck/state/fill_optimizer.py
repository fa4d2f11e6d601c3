"""Filling a torch optimizer, whose state does not exist yet when it is loaded before its first step.

So what was saved is checked against the parameters that the state belongs to, and the state dict is
built from the checkpoint: state tensors that exist are filled in place, the others are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from .fill_objects import ObjectFill
from .header import Key, Path, entries, materialize, plain
from .sharding import is_dtensor, local_of, wrap
from .tensors import DTYPES

if TYPE_CHECKING:
    from .fill import FillPlan

#: State of torch's optimizers that has its parameter's shape, always.
_PARAMETER_SHAPED = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "sum", "prev", "step_size", "exp_inf", "ax",
})  # fmt: skip


class OptimizerFill(ObjectFill):
    """An optimizer with torch's own load_state_dict."""

    target: torch.optim.Optimizer

    def __init__(
        self, target: torch.optim.Optimizer, value: pb.StateValue, path: Path, plan: FillPlan
    ) -> None:
        super().__init__(target, value, path, plan)
        self._saved = entries(value.dict) if value.WhichOneof("kind") == "dict" else {}
        state, groups = self._saved.get("state"), self._saved.get("param_groups")
        if state is None or groups is None or not state.HasField("dict") or not groups.HasField("list"):
            plan.mismatch(path, "is an optimizer here, but what was saved there is no optimizer's state")
            return
        self._state = entries(state.dict)
        self._groups = groups.list
        self._parameters: dict[Key, torch.Tensor] = {}
        if self._check_groups():
            for key, item in self._state.items():
                self._check_state(key, item)

    def _check_groups(self) -> bool:
        """Compare the groups and learn which parameter each saved index means."""
        here, path = self.target.param_groups, (*self.path, "param_groups")
        if len(here) != len(self._groups.items):
            self.plan.mismatch(
                path, f"has {len(here)} groups here, {len(self._groups.items)} in the checkpoint"
            )
            return False
        good = True
        for index, (group, item) in enumerate(zip(here, self._groups.items, strict=True)):
            saved = entries(item.dict)
            indexes = _plain_list(saved.get("params"))
            if indexes is None or len(indexes) != len(group["params"]):
                count = "no" if indexes is None else len(indexes)
                self.plan.mismatch(
                    (*path, index), f"has {len(group['params'])} parameters here, {count} in the checkpoint"
                )
                good = False
                continue
            self._parameters.update(zip(indexes, group["params"], strict=True))
            for key, default in self.target.defaults.items():
                # Numbers that a step needs; switches come and go between versions of torch.
                if key not in saved and default is not None and not isinstance(default, bool):
                    self.plan.mismatch(
                        (*path, index, key), "is not in the checkpoint: another kind of optimizer?"
                    )
        return good

    def _check_state(self, key: Key, item: pb.StateValue) -> None:
        path = (*self.path, "state", key)
        if isinstance(key, str) or not item.HasField("dict"):
            return  # belongs to no parameter
        parameter = self._parameters.get(key)
        if parameter is None:
            self.plan.mismatch(path, "is in the checkpoint, but no such parameter is here")
            return
        for name, value in entries(item.dict).items():
            if value.WhichOneof("kind") == "tensor":
                self._check_tensor(parameter, name, value.tensor, (*path, name))

    def _check_tensor(self, parameter: torch.Tensor, name: Key, index: int, path: Path) -> None:
        current = self._existing(parameter, name)
        if current is not None:
            self.plan.claim(current, index, path)
            return
        self.plan.claim_like(parameter, index, path, shaped=name in _PARAMETER_SHAPED)

    def _existing(self, parameter: torch.Tensor, name: Key) -> torch.Tensor | None:
        current = self.target.state.get(parameter, {}).get(name)
        return current if isinstance(current, torch.Tensor) else None

    def apply(self) -> None:
        """Build the state dict, load it, and undo what loading does to dtypes."""
        built: dict[Key, Any] = {}
        exact: list[tuple[torch.Tensor, Key, torch.Tensor]] = []
        for key, item in self._state.items():
            path = (*self.path, "state", key)
            if key not in self._parameters or not item.HasField("dict"):
                built[key] = materialize(item, self.fresh, path)
                continue
            parameter = self._parameters[key]
            built[key] = {}
            for name, value in entries(item.dict).items():
                if value.WhichOneof("kind") == "tensor":
                    made = built[key][name] = self._make(parameter, name, value.tensor)
                    exact.append((parameter, name, made))
                else:
                    built[key][name] = materialize(value, self.fresh, (*path, name))
        rest = {
            k: materialize(v, self.fresh, (*self.path, k)) for k, v in self._saved.items() if k != "state"
        }
        for group, current in zip(rest["param_groups"], self.target.param_groups, strict=True):
            _move_to_devices_of(current, group)
        self.plan.flush()
        self.load({**rest, "state": built})
        for parameter, name, made in exact:
            # torch casts state to its parameter's dtype: float32 state of a bfloat16 parameter is rounded.
            loaded = self._existing(parameter, name)
            if loaded is not None and loaded.dtype != made.dtype:
                self.target.state[parameter][name] = made.to(loaded.device)

    def _make(self, parameter: torch.Tensor, name: Key, index: int) -> torch.Tensor:
        record = self.plan.header.tensors[index]
        current = self._existing(parameter, name)
        if current is not None:
            self.plan.later(local_of(current), index)
            return current
        local = local_of(parameter)
        if name == "step":
            made = self.plan.fresh(index)  # stays on the CPU unless the optimizer itself moves it
        else:
            shape, dtype = tuple(record.shape), DTYPES[record.dtype]
            if tuple(local.shape) == shape:
                made = torch.empty_like(local, dtype=dtype, requires_grad=False)
            else:
                made = torch.empty(shape, dtype=dtype, device=local.device)
            self.plan.later(made, index)
        return wrap(made, parameter) if record.HasField("dtensor") and is_dtensor(parameter) else made


def _plain_list(value: pb.StateValue | None) -> list[Any] | None:
    """The numbers of a saved `params` list; None when it is none."""
    if value is None or not value.HasField("list"):
        return None
    if any(item.WhichOneof("kind") != "int_value" for item in value.list.items):
        return None
    return [plain(item) for item in value.list.items]


def _move_to_devices_of(current: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Put a group's tensors (a learning rate under CUDA graphs) where the caller's are."""
    for key, value in loaded.items():
        have = current.get(key)
        if isinstance(value, torch.Tensor) and isinstance(have, torch.Tensor):
            loaded[key] = value.to(have.device)
