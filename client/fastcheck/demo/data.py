"""Real text that is on every machine: the source code of the Python standard library.

A batch is a pure function of (seed, step, rank), so there is no data position to save.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

CORPUS_BYTES_MAX = 4 << 20


def corpus(bytes_max: int = CORPUS_BYTES_MAX) -> torch.Tensor:
    """The top-level standard library modules in order of their names, as uint8 [bytes]."""
    text = bytearray()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= bytes_max:
            break
    return torch.frombuffer(text[:bytes_max], dtype=torch.uint8)


def batch(
    text: torch.Tensor, *, seed: int, step: int, rank: int, size: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next bytes of one rank's step, int64 [size, context] each."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)
    starts = torch.randint(0, text.numel() - context, (size,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
