"""The rounds of one candidate in one process: save, change the state at once, wait until safe, restore, compare.

Every tensor changes as soon as `save` returns, as in training. A library that still reads it then saves a torn state,
and the comparison after the restore says so. Only two numbers of each tensor change, since time spent here would count
as the candidate's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from ..limits import Memcpy
from ..workload import change, state_bytes
from .candidate import Candidate, State, already_safe, fill, outline, tensors

#: Saves before those that count, the very first one included: they touch fresh memory.
WARM_UP = 3


@dataclasses.dataclass(kw_only=True)
class Rounds:
    """Seconds of every round of one process; lists of the same length belong together, round by round."""

    state_bytes: int
    #: The very first save, and a one-thread copy of the same bytes in the same round.
    first_blocked_s: float = 0.0
    first_memcpy_s: float = 0.0
    memcpy_s: list[float] = dataclasses.field(default_factory=list)
    blocked_s: list[float] = dataclasses.field(default_factory=list)
    #: From the call of `save`.
    safe_s: list[float] = dataclasses.field(default_factory=list)
    restore_s: list[float] = dataclasses.field(default_factory=list)
    #: What else the candidate could tell about its saves.
    extra_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    #: Rounds, warm-up included, after whose restore a tensor was not what had been saved; and the first such tensor.
    wrong_rounds: int = 0
    first_wrong: str = ""


def measure(candidate: Candidate, state: State, rounds: int, say: Callable[[str], None]) -> Rounds:
    """Warm up, then measure so many rounds."""
    memcpy = Memcpy(state_bytes(state))
    expected = outline(state)
    _replace_by_copies(expected)
    found = Rounds(state_bytes=state_bytes(state))
    for step in range(1, WARM_UP + rounds + 1):
        change(state)
        fill(expected, state)
        memcpy_s = memcpy.run()
        started = time.perf_counter()
        until_safe = candidate.save(step, state)
        blocked_s = time.perf_counter() - started
        if until_safe is already_safe:
            extra, safe_s = until_safe(), blocked_s
        else:
            _disturb(state)
            extra = until_safe()
            safe_s = time.perf_counter() - started
        _wreck(state)
        started = time.perf_counter()
        candidate.restore(state)
        restore_s = time.perf_counter() - started
        wrong = first_difference(state, expected)
        if wrong:
            found.wrong_rounds += 1
            found.first_wrong = found.first_wrong or wrong
            fill(state, expected)
        say(
            f"  step {step}: memcpy {memcpy_s * 1e3:.0f} ms, blocked {blocked_s * 1e3:.0f}, safe {safe_s * 1e3:.0f}, "
            f"restore {restore_s * 1e3:.0f}" + (f", NOT IDENTICAL: {wrong}" if wrong else "")
        )
        if step == 1:
            found.first_blocked_s, found.first_memcpy_s = blocked_s, memcpy_s
        if step > WARM_UP:
            found.memcpy_s.append(memcpy_s)
            found.blocked_s.append(blocked_s)
            found.safe_s.append(safe_s)
            found.restore_s.append(restore_s)
            for name, seconds in extra.items():
                found.extra_s.setdefault(name, []).append(seconds)
    return found


def first_difference(state: State, expected: State) -> str:
    """Name of the first tensor that differs in a bit; empty when none does."""
    for (name, tensor), (_, wanted) in zip(tensors(state), tensors(expected), strict=True):
        if not torch.equal(_bits(tensor), _bits(wanted)):
            return name
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _disturb(state: State) -> None:
    """What training may do from now on: the first and the last number of each tensor are others."""
    for _, tensor in tensors(state):
        flat = tensor.view(-1)
        flat[0] += 1.0
        flat[-1] += 1.0


def _wreck(state: State) -> None:
    """So that whatever a restore leaves out is seen."""
    for _, tensor in tensors(state):
        tensor.fill_(-1.0)


def _replace_by_copies(state: dict[Any, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, dict):
            _replace_by_copies(value)
        else:
            state[key] = value.clone()
