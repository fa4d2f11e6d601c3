"""What a candidate has to answer, and what all of them share: walking a state, filling it from a loaded one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

State = dict[str, Any]
#: Waits until what was saved is safe, by the candidate's own notion; further seconds that it can tell, by name.
UntilSafe = Callable[[], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Places:
    """Folders of one process: on the machine's memory, and on its disk. Whoever started it removes them."""

    memory: Path
    disk: Path


class Candidate(Protocol):
    """A library that saves a state to memory and restores it, as its users would ask it to.

    One is made per process. It may raise whatever it likes: the process then reports that it was not run.
    """

    def save(self, step: int, state: State) -> UntilSafe:
        """Save; return as soon as training may change `state`. This is the time that training is blocked."""

    def restore(self, state: State) -> None:
        """Fill the tensors of `state` with the newest step that is safe."""

    def close(self) -> None:
        """Free memory, end processes."""


def already_safe() -> Mapping[str, float]:
    """For candidates whose `save` returns only when it is done."""
    return {}


def tensors(state: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by path, in order."""
    for key, value in state.items():
        name = f"{path}/{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from tensors(value, name)
        else:
            yield name, value


def fill(state: State, loaded: Mapping[Any, Any]) -> None:
    """Copy what a library returned into the tensors that exist.

    Raises:
        KeyError: something is missing in it.
    """
    for key, value in state.items():
        if isinstance(value, Mapping):
            fill(value, loaded[key])  # type: ignore[arg-type]
        else:
            value.copy_(loaded[key])


def outline(state: Mapping[Any, Any]) -> State:
    """New dicts with the very same tensors, for libraries that put things of their own into what they get."""
    return {key: outline(value) if isinstance(value, Mapping) else value for key, value in state.items()}
