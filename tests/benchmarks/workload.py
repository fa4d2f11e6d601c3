"""The state that is saved: as a GPT-2 of 124M parameters with AdamW has it, 1.5 GB in fp32; or one of another width."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, CONTEXT, WIDTH, LAYERS = 50257, 1024, 768, 12


def width_of(size_bytes: float) -> int:
    """The width whose state, moments included, comes near so many bytes. Vocabulary and context grow with it."""
    per_square = (VOCABULARY + CONTEXT) / WIDTH + 12 * LAYERS
    return max(8, round(math.sqrt(size_bytes / 12 / per_square) / 8) * 8)


def parameter_shapes(width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """The 148 parameters by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (VOCABULARY * width // WIDTH, width),
        "wpe": (CONTEXT * width // WIDTH, width),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"h.{layer}.ln_1.weight": (width,),
            f"h.{layer}.ln_1.bias": (width,),
            f"h.{layer}.attn.c_attn.weight": (width, 3 * width),
            f"h.{layer}.attn.c_attn.bias": (3 * width,),
            f"h.{layer}.attn.c_proj.weight": (width, width),
            f"h.{layer}.attn.c_proj.bias": (width,),
            f"h.{layer}.ln_2.weight": (width,),
            f"h.{layer}.ln_2.bias": (width,),
            f"h.{layer}.mlp.c_fc.weight": (width, 4 * width),
            f"h.{layer}.mlp.c_fc.bias": (4 * width,),
            f"h.{layer}.mlp.c_proj.weight": (4 * width, width),
            f"h.{layer}.mlp.c_proj.bias": (width,),
        }
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def gpt2_state(seed: int = 0, width: int = WIDTH) -> dict[str, Any]:
    """Weights and moments of random bits that compress as badly as real ones; raw bytes travel anyway."""
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(width)
    return {
        "model": {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        "optimizer": {
            index: {
                "step": torch.tensor(float(seed)),
                "exp_avg": torch.randn(shape, generator=generator) * 1e-3,
                "exp_avg_sq": torch.rand(shape, generator=generator) * 1e-6,
            }
            for index, shape in enumerate(shapes.values())
        },
    }


def adamw_state(seed: int = 0, width: int = WIDTH) -> tuple[dict[str, Any], Callable[[], None]]:
    """Parameters with torch's AdamW, which has taken a step, and what takes the next one, with gradients of noise."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
        for name, shape in parameter_shapes(width).items()
    }
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=1e-3)

    def take_step() -> None:
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
        optimizer.step()
        optimizer.zero_grad()

    take_step()
    return {"model": parameters, "optimizer": optimizer}, take_step


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors."""
    return sum(
        state_bytes(value) if isinstance(value, dict) else value.numel() * value.element_size()
        for value in state.values()
    )


def change(state: dict[str, Any]) -> None:
    """Make the next step differ, as an optimizer would; also keeps the source warm."""
    for value in state.values():
        if isinstance(value, dict):
            change(value)
        else:
            value.add_(1e-4)
