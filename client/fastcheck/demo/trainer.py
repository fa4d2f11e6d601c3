"""One rank of the demo's training: FSDP2 over gloo, a checkpoint after every step.

`python -m fastcheck.demo.trainer`, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set as any launcher sets
them. It says what happens in JSON lines on stdout, waits for a line on stdin before it loads (the launcher
uses that to start it while a node is still coming up), and ends when stdin is closed before.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that every torch program uses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastcheck import Checkpointer, SaveHandle

from . import JOB, TrainSettings
from .model import GPT, VOCABULARY, batch, corpus, parameter_count

#: How long a rank waits for the others in any collective before it takes them for lost.
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_LAST_COMMIT_TIMEOUT_S = 60.0

Say = Callable[..., None]


class RandomState:
    """The random generator as something that can be saved: dropout must go on where it was."""

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generator."""
        torch.set_rng_state(state["cpu"])


class RankTraining:
    """Model, optimizer and random state of one rank, and one step of training."""

    def __init__(self, settings: TrainSettings, rank: int, world_size: int) -> None:
        self._settings = settings
        self._rank = rank
        self._text = corpus()
        # All ranks make the same whole model and keep their part of it.
        torch.manual_seed(settings.seed)
        self.model = GPT(
            width=settings.width,
            heads=settings.heads,
            layers=settings.layers,
            context=settings.context,
            dropout=settings.dropout,
        )
        self.params = parameter_count(self.model)
        mesh = init_device_mesh("cpu", (world_size,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        # From here on every rank draws its own dropout.
        torch.manual_seed(settings.seed * 1000 + rank + 1)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "random": RandomState(),
        }

    def train(self, step: int) -> float:
        """Train one step; returns this rank's loss."""
        s = self._settings
        inputs, targets = batch(
            self._text, seed=s.seed, step=step, rank=self._rank, size=s.batch, context=s.context
        )
        loss = F.cross_entropy(self.model(inputs).view(-1, VOCABULARY), targets.reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's part of all that makes up the state, by name."""
        found: list[tuple[str, torch.Tensor]] = []
        for name, thing in self.state.items():
            _collect(name, thing.state_dict(), found)
        return sorted(found, key=lambda item: item[0])

    def digest(self) -> str:
        """SHA-256 of all local bytes of the state."""
        sha = hashlib.sha256()
        for name, tensor in self.tensors():
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole = tensor.contiguous()
            sha.update(ctypes.string_at(whole.data_ptr(), whole.nbytes))
        return sha.hexdigest()


class WarmCopy:
    """What a plain copy of the same bytes costs on memory that was touched before: the yardstick for `save`."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []

    def measure_ms(self, tensors: list[torch.Tensor]) -> float:
        """Copy the tensors once; 0 at the first call, which makes the memory."""
        if len(self._targets) != len(tensors):
            self._targets = [tensor.clone() for tensor in tensors]
            return 0.0
        started = time.perf_counter()
        for target, tensor in zip(self._targets, tensors, strict=True):
            target.copy_(tensor)
        return (time.perf_counter() - started) * 1000


def _collect(name: str, value: Any, found: list[tuple[str, torch.Tensor]]) -> None:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        found.append((name, local.detach()))
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{name}.{key}", item, found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{name}.{index}", item, found)


def run(settings: TrainSettings, digest_at: int | None, say: Say, begin: TextIO) -> None:
    """Train this rank from the newest committed step, or from the start, to the last step.

    Args:
        settings: the run.
        digest_at: also say the state's digest after this step.
        say: takes an event's name and its fields.
        begin: a line from here says that this rank's daemon is there.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=_COLLECTIVE_TIMEOUT)
    training = RankTraining(settings, rank, world_size)
    say("ready", params=training.params)
    if not begin.readline():
        raise SystemExit("the launcher is gone")
    with Checkpointer(job=JOB, rank=rank, world_size=world_size) as checkpointer:
        started = time.monotonic()
        step = checkpointer.load(training.state)
        load_s = time.monotonic() - started
        say("loaded", step=step, load_s=load_s, digest=None if step is None else training.digest())
        _train(training, checkpointer, (step or 0) + 1, settings.steps, digest_at, say)
    say("done", digest=training.digest())
    dist.destroy_process_group()


def _train(
    training: RankTraining, checkpointer: Checkpointer, first: int, last: int, digest_at: int | None, say: Say
) -> None:
    yardstick = WarmCopy()
    under_way: deque[tuple[int, SaveHandle]] = deque()
    for step in range(first, last + 1):
        loss = training.train(step)
        if step == digest_at:
            say("digest", step=step, digest=training.digest())
        memcpy_ms = yardstick.measure_ms([tensor for _, tensor in training.tensors()])
        started = time.perf_counter()
        under_way.append((step, checkpointer.save(step, training.state)))
        stall_ms = (time.perf_counter() - started) * 1000
        say("step", step=step, loss=loss.hex(), stall_ms=stall_ms, memcpy_ms=memcpy_ms)
        while under_way and under_way[0][1].done:
            _say_saved(*under_way.popleft(), say)
    for step, handle in under_way:
        if step == last:
            handle.result(timeout=_LAST_COMMIT_TIMEOUT_S)
        else:  # may have been given up for a newer one
            handle.exception(timeout=_LAST_COMMIT_TIMEOUT_S)
        _say_saved(step, handle, say)


def _say_saved(step: int, handle: SaveHandle, say: Say) -> None:
    error = handle.exception()
    stats = handle.stats
    say(
        "saved",
        step=step,
        committed=handle.committed,
        error=None if error is None else f"{type(error).__name__}: {error}",
        bytes=stats["bytes"],
        encoded_bytes=stats["encoded_bytes"],
        waited_ms=stats["waited_s"] * 1000,
        stage_ms=stats["stage_s"] * 1000,
    )


def main() -> None:
    """Entry point of a rank's process."""
    settings, rest = TrainSettings.parse(sys.argv[1:])
    digest_at = int(rest[0].removeprefix("--digest-at=")) if rest else None
    # Events alone go to the pipe; what a library prints goes to the log.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    sys.stdout = sys.stderr
    rank = int(os.environ["RANK"])

    def say(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, "rank": rank, "at_s": time.monotonic(), **fields}) + "\n")

    run(settings, digest_at, say, sys.stdin)


if __name__ == "__main__":
    main()
