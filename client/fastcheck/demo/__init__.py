"""`fastcheck demo`: train on four nodes, lose one for real, go on bit for bit from the others' RAM.

Here is what is trained and for how long, without torch. Then:

model, trainer   one rank, as any training script would look; the only parts that need torch
ranks            the launcher: starts a process per rank, reads their events, ends them
scenario         the story: up, train, kill, detect, restart, load, finish, compare
report           the figures and the verdict, from the ranks' events
node_watch       the nodes' states, from the admin service
display          the terminal
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

JOB = "demo"
NODES = 4


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A training run. The same settings and as many ranks give the same bits."""

    steps: int = 20
    seed: int = 7
    #: Sequences per rank and step, and bytes per sequence. Enough to see it learn; the demo is about the saving.
    batch: int = 4
    context: int = 128
    #: 7 blocks of width 256 make 5.7 million parameters: 68 MB of state with AdamW's two moments.
    width: int = 256
    heads: int = 4
    layers: int = 7
    dropout: float = 0.1
    learning_rate: float = 1e-3

    def arguments(self) -> list[str]:
        """The settings as the trainer's command line."""
        return [f"--{f.name.replace('_', '-')}={getattr(self, f.name)}" for f in dataclasses.fields(self)]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> tuple[TrainSettings, list[str]]:
        """Read the settings back; also returns what else was on the command line."""
        parser = argparse.ArgumentParser(prog="python -m fastcheck.demo.trainer")
        for f in dataclasses.fields(cls):
            parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
        found, rest = parser.parse_known_args(arguments)
        return cls(**vars(found)), rest
