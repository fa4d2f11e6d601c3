"""A byte-level GPT in plain torch modules: nothing in it knows that it is sharded or saved."""

from __future__ import annotations

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
