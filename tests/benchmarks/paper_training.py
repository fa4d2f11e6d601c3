"""The models of the paper's experiment: byte GPTs that really train, each with its own initialisation and batches.

A state of the wanted size is several such models, never one model several times: copies of the same bytes would be
found by any compressor whose window reaches from one to the next. They are trained once to the last stage and their
states on the way there are kept in a folder; a rank takes them up from there, and then saves after every step that it
really makes, as per-step checkpointing does. `python -m tests.benchmarks.paper_training FOLDER SEED STAGE...` trains
one seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name that every torch program uses

from fastcheck.demo.model import batch, corpus

from .sequences import BATCH, CONTEXT, LR, State, byte_gpt, cosine, decay_groups

#: The cosine's length: the same whatever stages are asked for, so that a stage is always the same point of it.
SCHEDULE_STEPS = 1000
#: Part of the files' names: what was trained otherwise is not taken for this.
VERSION = 1
TRAINING_TIMEOUT_S = 7200


class Trainee:
    """One byte GPT of 3.3 million parameters in fp32 with AdamW; batches follow from seed and step."""

    def __init__(self, seed: int, text: torch.Tensor) -> None:
        torch.manual_seed(seed)
        self._seed, self._text = seed, text
        self.model = byte_gpt()
        self.optimizer = torch.optim.AdamW(decay_groups(dict(self.model.named_parameters())), lr=LR)
        self._scheduler = cosine(self.optimizer, SCHEDULE_STEPS)
        self.steps = 0

    def step(self) -> float:
        """Train one step; its loss."""
        self.steps += 1
        inputs, targets = batch(
            self._text, seed=self._seed, step=self.steps, rank=0, size=BATCH, context=CONTEXT
        )
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._scheduler.step()
        return loss.item()

    def keep(self, file: Path) -> None:
        """Write everything that `take_up` needs; the file is there when all of it is."""
        kept = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "steps": self.steps,
        }
        unfinished = file.with_suffix(f".{os.getpid()}.tmp")
        torch.save(kept, unfinished)
        unfinished.replace(file)

    def take_up(self, file: Path) -> None:
        """Go on from what `keep` wrote."""
        kept = torch.load(file, weights_only=True)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self._scheduler.load_state_dict(kept["scheduler"])
        self.steps = kept["steps"]


class Ensemble:
    """What one rank trains: several trainees side by side."""

    def __init__(self, folder: Path, seeds: Sequence[int]) -> None:
        self._folder, self._seeds = folder, seeds
        text = corpus()
        self._trainees = [Trainee(seed, text) for seed in seeds]

    def take_up(self, stage: int) -> None:
        """Go on from a stage."""
        for seed, trainee in zip(self._seeds, self._trainees, strict=True):
            trainee.take_up(state_file(self._folder, seed, stage))

    def step(self) -> list[float]:
        """Train each one step."""
        return [trainee.step() for trainee in self._trainees]

    @property
    def state(self) -> State:
        """As a trainer saves it."""
        return {
            f"model{i}": {"model": t.model, "optimizer": t.optimizer} for i, t in enumerate(self._trainees)
        }

    def state_dict(self, prefix: str) -> dict[str, Any]:
        """The same as tensors, for torch.distributed.checkpoint; names of different ranks differ."""
        return {
            f"{prefix}.model{i}": {"model": t.model.state_dict(), "optimizer": t.optimizer.state_dict()}
            for i, t in enumerate(self._trainees)
        }

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All of them, in a fixed order."""
        return [p for t in self._trainees for p in t.model.parameters()]

    @property
    def moments(self) -> list[torch.Tensor]:
        """First and second moments, in a fixed order."""
        return [
            t.optimizer.state[p][name]
            for t in self._trainees
            for p in t.model.parameters()
            for name in ("exp_avg", "exp_avg_sq")
        ]


def state_file(folder: Path, seed: int, stage: int) -> Path:
    """Where a seed's state after so many steps is kept."""
    return folder / f"byte-gpt-v{VERSION}-torch{torch.__version__}-seed{seed}-step{stage}.pt"


def train(folder: Path, seed: int, stages: Iterable[int]) -> None:
    """Train one seed through all stages that are not there yet."""
    torch.set_num_threads(1)  # as fast at this size, and the same sums on every machine
    trainee = Trainee(seed, corpus())
    for stage in sorted(stages):
        file = state_file(folder, seed, stage)
        if file.exists():
            trainee.take_up(file)
            continue
        while trainee.steps < stage:
            trainee.step()
        trainee.keep(file)


def train_all(
    folder: Path, seeds: Iterable[int], stages: Sequence[int], processes: int, say: Callable[[str], None]
) -> None:
    """Train the seeds whose states are missing, a few at a time.

    Raises:
        RuntimeError: a training failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [s for s in seeds if not all(state_file(folder, s, stage).exists() for stage in stages)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while missing or running:
            while missing and len(running) < processes:
                seed = missing.pop(0)
                say(f"training seed {seed} to step {max(stages)}; {len(missing)} more wait")
                command = [sys.executable, "-m", __name__, str(folder), str(seed), *map(str, stages)]
                running[seed] = subprocess.Popen(command)
            seed, process = next(iter(running.items()))
            if process.wait(TRAINING_TIMEOUT_S):
                raise RuntimeError(f"training seed {seed} failed, see above")
            del running[seed]
    finally:
        for process in running.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), [int(stage) for stage in sys.argv[3:]])
