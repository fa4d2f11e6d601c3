"""What the demo trains: a byte-level GPT in plain torch modules, on text that is on every machine.

Nothing in the model knows that it is sharded or saved. The text is the source code of the Python standard library; a
batch is a pure function of (seed, step, rank), so there is no position in the data to save.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  the name that every torch program uses
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width)))
        out: torch.Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, width: int, heads: int, layers: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bytes as int64 [batch, time] to logits [batch, time, 256]."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def parameter_count(model: nn.Module) -> int:
    """Parameters of the whole model, sharded or not."""
    return sum(parameter.numel() for parameter in model.parameters())


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
