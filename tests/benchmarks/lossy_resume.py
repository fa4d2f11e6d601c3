"""`--only lossy`: does a trainer that resumes from a lossy checkpoint end where it would have ended?

For each seed a small GPT trains, is saved, and goes on three ways: without interruption, resumed from the exact bytes
(which must end with the very same bits), and resumed from each lossy form of them. A setting may move the
validation loss by one hundredth of the noise between seeds; the control, which loses its moments, must fail. The noise
itself would be too wide a bar: losing both moments stays near it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name that every torch program uses

from fastcheck.demo.model import GPT, batch, corpus
from fastcheck.state import header
from fastcheck.state.fill import fill
from fastcheck.state.layouts import Layouts
from fastcheck_proto.v1 import layout_pb2 as pb

from .seed_noise import CONTROL, Experiment, Outcome
from .sequences import Snapshot, State, cosine, decay_groups, quantised, snapshot

CONTEXT, BATCH = 64, 8
#: Bytes at the end of the text that no batch of the training holds.
VALIDATION_BYTES = 1 << 16
#: Steps between two saves: a lossy step's base is the lossy step before it.
SAVE_EVERY = 10
SAVES = 5


@dataclass(frozen=True)
class Setting:
    """A way to lose something."""

    name: str
    precision: pb.Precision


SETTINGS = (
    Setting("momentum index8", pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX8)),
    Setting("momentum index4", pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX4)),
    Setting("weights bounded(1e-3)", pb.Precision(weights_bound=1e-3)),
    Setting("index4 and bounded(1e-3)", pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX4, weights_bound=1e-3)),
)
MOMENTS = (pb.ROLE_EXP_AVG, pb.ROLE_EXP_AVG_SQ, pb.ROLE_MAX_EXP_AVG_SQ, pb.ROLE_MOMENTUM)


class Trainer:
    """A byte GPT of 0.66 million parameters with AdamW and a cosine; its batches follow from seed and step."""

    def __init__(self, seed: int, text: torch.Tensor, steps: int) -> None:
        torch.manual_seed(seed)
        self._seed, self._text = seed, text
        self.model = GPT(width=128, heads=4, layers=3, context=CONTEXT, dropout=0.0)
        self._optimizer = torch.optim.AdamW(decay_groups(dict(self.model.named_parameters())), lr=1e-3)
        self._scheduler = cosine(self._optimizer, steps)
        self._layouts = Layouts()
        self.state: State = {
            "model": self.model, "optimizer": self._optimizer, "scheduler": self._scheduler
        }  # fmt: skip

    def train(self, first: int, last: int) -> None:
        """Make these steps, both included."""
        for step in range(first, last + 1):
            inputs, targets = batch(
                self._text, seed=self._seed, step=step, rank=0, size=BATCH, context=CONTEXT
            )
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._scheduler.step()

    def save(self, step: int) -> Snapshot:
        """The state's bytes, as `Checkpointer.save` stages them."""
        return snapshot(step, self.state, self._layouts)

    def resume(self, saved: Snapshot) -> None:
        """Fill this trainer from a saved state, as `Checkpointer.load` does."""
        start, stop = saved.header
        segment = torch.from_numpy(saved.bytes)
        fill(self.state, header.parse(saved.bytes[start:stop].tobytes(), len(saved.bytes)), segment)

    @torch.no_grad()
    def validation(self, held_out: torch.Tensor) -> float:
        """Mean cross entropy in nats over all of `held_out`, uint8 [bytes], as a sum in double precision."""
        windows = held_out[: held_out.numel() // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1).long()
        total = 0.0
        for part in windows.split(256):
            logits = self.model(part[:, :-1]).flatten(0, 1)
            total += F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item()
        return total / (windows.shape[0] * CONTEXT)


def without_moments(saved: Snapshot) -> Snapshot:
    """The control: all moments zero."""
    dropped, start = copy.deepcopy(saved), 0
    for chunk in dropped.layout.chunks:
        for run in chunk.runs:
            if run.role in MOMENTS:
                assert run.dtype == "float32"
                dropped.bytes[start + run.offset : start + run.offset + 4 * run.elements] = 0
        start += chunk.bytes
    return dropped


def run(seeds: int, quick: bool, say: Callable[[str], None]) -> Experiment:
    """Train, save, resume in every way, for each seed.

    Raises:
        RuntimeError: a resume from the exact bytes does not end with the bits of the uninterrupted run.
    """
    torch.set_num_threads(1)  # so that sums are formed in the same order on every machine, and no team waits
    save_at, last = (60, 100) if quick else (300, 500)
    text = corpus()
    text, held_out = text[:-VALIDATION_BYTES], text[-VALIDATION_BYTES:]
    experiment = Experiment([], [Outcome(setting.name) for setting in SETTINGS] + [Outcome(CONTROL)])
    for seed in range(seeds):
        started = time.perf_counter()
        trainer = Trainer(seed, text, last)
        exact, lossy = _train_and_save(trainer, save_at)
        trainer.train(save_at + 1, last)
        uninterrupted = trainer.save(last)

        resumed = _resumed(exact, text, last, seed)
        if not (resumed.save(last).bytes == uninterrupted.bytes).all():
            raise RuntimeError(f"seed {seed}: the exact resume and the uninterrupted run differ")
        experiment.exact.append(resumed.validation(held_out))
        for outcome, saved in zip(experiment.outcomes, [*lossy, without_moments(exact)], strict=True):
            loss = _resumed(saved, text, last, seed).validation(held_out)
            outcome.differences.append(loss - experiment.exact[-1])
        say(
            f"seed {seed}: validation {experiment.exact[-1]:.4f}, resumed exactly, bit for bit; "
            + ", ".join(f"{o.name} {o.differences[-1]:+.1e}" for o in experiment.outcomes)
            + f"; {time.perf_counter() - started:.0f} s"
        )
    return experiment


def _train_and_save(trainer: Trainer, save_at: int) -> tuple[Snapshot, list[Snapshot]]:
    """Train up to the last save; its exact bytes, and what each setting made of them in its closed loop."""
    lossy: list[Snapshot | None] = [None] * len(SETTINGS)
    step = 0
    for save in range(save_at - (SAVES - 1) * SAVE_EVERY, save_at + 1, SAVE_EVERY):
        trainer.train(step + 1, save)
        step = save
        exact = trainer.save(save)
        lossy = [quantised(exact, base, s.precision) for base, s in zip(lossy, SETTINGS, strict=True)]
    return exact, [saved for saved in lossy if saved is not None]


def _resumed(saved: Snapshot, text: torch.Tensor, last: int, seed: int) -> Trainer:
    """A new trainer that starts from a saved state and trains to the end."""
    trainer = Trainer(seed, text, last)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(float("nan"))  # whatever is not filled shows
    trainer.resume(saved)
    trainer.train(saved.step + 1, last)
    return trainer
