"""State that a resumed run needs besides model and optimizer, as objects for the state given to `Checkpointer.save`.

    state = {"model": model, "optimizer": optimizer, **run_state(loader=loader, scheduler=scheduler, scaler=scaler)}

To continue bit for bit, a run must also draw the same random numbers and see the same next batch. Everything here is
tensors and plain values: nothing is pickled. The entries `rng` and `loader` differ from rank to rank: with
`Checkpointer(..., replicated=True)` pass `per_rank=resume.PER_RANK`.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from .errors import UnsupportedStateError

logger = logging.getLogger("fastcheck")

#: Keys of `run_state` whose tensors differ from rank to rank.
PER_RANK = ("rng", "loader")


def run_state(
    *,
    loader: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    generators: Mapping[str, torch.Generator] | None = None,
) -> dict[str, Any]:
    """Entries for a state: `rng`, and `loader`, `scheduler`, `scaler` as far as given.

    Args:
        loader: its position in the data; torchdata's `StatefulDataLoader`, or anything with state_dict and
            load_state_dict.
        scheduler: of the learning rate; several: a dict or list of them.
        scaler: a `torch.amp.GradScaler`.
        generators: further generators of yours by name; one that was passed to the loader belongs here.

    Raises:
        UnsupportedStateError: one of them has no state_dict and load_state_dict.
    """
    given = {"loader": loader, "scheduler": scheduler, "scaler": scaler}
    found = {key: value for key, value in given.items() if value is not None}
    for key, value in found.items():
        _check(key, value)
    if loader is not None:
        found["loader"] = Position(loader)
    # Loaded in this order: a loader draws random numbers when it begins, so the generators come last.
    return {**found, "rng": Generators(generators)}


def _check(key: str, value: Any) -> None:
    if isinstance(value, dict | list | tuple) and key != "loader":
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check(f"{key}[{name!r}]", item)
    elif not all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        hint = ""
        if isinstance(value, torch.utils.data.DataLoader):
            hint = ": torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and has"
        raise UnsupportedStateError(
            f"{key} is a {type(value).__qualname__}, which has no state_dict and load_state_dict{hint}"
        )


class Position:
    """A data loader's place in the data.

    Starting to iterate draws from torch's generator, and a run that resumes in the middle of an epoch starts once more
    than an uninterrupted one: all later numbers would differ. So the loader starts as soon as its state is loaded, and
    the generators are set after that. (torchdata's loader makes its iterator when it is asked for its state, and the
    next loop uses that iterator.)
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> Any:
        """The loader's own."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the position and start iterating."""
        self._loader.load_state_dict(state_dict)
        self._loader.state_dict()


class Generators:
    """The states of all random generators of this process, as an object that is saved and loaded.

    Python's `random`, NumPy's global generator if it was imported, torch's on the CPU, those of all CUDA devices if
    CUDA is in use, and `torch.Generator`s by name.
    """

    def __init__(self, generators: Mapping[str, torch.Generator] | None = None) -> None:
        self._own = dict(generators or {})

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; a few kB, and 16 bytes per CUDA device."""
        version, words, gauss = random.getstate()
        found: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "torch": torch.get_rng_state(),
            "own": {name: generator.get_state() for name, generator in self._own.items()},
        }
        if "numpy.random" in sys.modules:
            found["numpy"] = _numpy_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = torch.cuda.get_rng_state_all()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all generators in it.

        Raises:
            ValueError: it names a generator that is not here, or the other way round.
        """
        saved = state_dict["own"]
        if set(saved) != set(self._own):
            raise ValueError(f"generators {sorted(saved)} were saved, {sorted(self._own)} are here")
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state_dict["torch"])
        for name, state in saved.items():
            self._own[name].set_state(state)
        if "numpy" in state_dict:
            _set_numpy_state(state_dict["numpy"])
        _set_cuda_states(state_dict.get("cuda", []))


def _numpy_state() -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415  only where the trainer uses it

    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = dict(state["state"])
    key = torch.from_numpy(inner["key"].astype(np.int64))
    return {
        "kind": state["bit_generator"],
        "key": key,
        "pos": int(inner["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _set_numpy_state(saved: dict[str, Any]) -> None:
    import numpy as np  # noqa: PLC0415  as above

    inner = {"key": saved["key"].numpy().astype(np.uint32), "pos": saved["pos"]}
    np.random.set_state(
        {
            "bit_generator": saved["kind"],
            "state": inner,
            "has_gauss": saved["has_gauss"],
            "gauss": saved["gauss"],
        }
    )


def _set_cuda_states(states: list[torch.Tensor]) -> None:
    here = torch.cuda.device_count() if states and torch.cuda.is_available() else 0
    for device, state in enumerate(states[:here]):
        torch.cuda.set_rng_state(state, device)
    if len(states) > here:
        logger.warning(
            "the checkpoint has the random states of %d CUDA devices and %d are here: what runs on another device "
            "than before draws other numbers",
            len(states),
            here,
        )
