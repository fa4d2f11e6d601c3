"""The state that is saved: as a GPT-2 of 124M parameters with AdamW has it, 1.5 GB in fp32."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, CONTEXT, WIDTH, LAYERS = 50257, 1024, 768, 12


def parameter_shapes() -> dict[str, tuple[int, ...]]:
    """The 148 parameters by name."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (VOCABULARY, WIDTH), "wpe": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"h.{layer}.ln_1.weight": (WIDTH,),
            f"h.{layer}.ln_1.bias": (WIDTH,),
            f"h.{layer}.attn.c_attn.weight": (WIDTH, 3 * WIDTH),
            f"h.{layer}.attn.c_attn.bias": (3 * WIDTH,),
            f"h.{layer}.attn.c_proj.weight": (WIDTH, WIDTH),
            f"h.{layer}.attn.c_proj.bias": (WIDTH,),
            f"h.{layer}.ln_2.weight": (WIDTH,),
            f"h.{layer}.ln_2.bias": (WIDTH,),
            f"h.{layer}.mlp.c_fc.weight": (WIDTH, 4 * WIDTH),
            f"h.{layer}.mlp.c_fc.bias": (4 * WIDTH,),
            f"h.{layer}.mlp.c_proj.weight": (4 * WIDTH, WIDTH),
            f"h.{layer}.mlp.c_proj.bias": (WIDTH,),
        }
    return shapes | {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}


def gpt2_state(seed: int = 0) -> dict[str, Any]:
    """Weights and moments of random bits that compress as badly as real ones; raw bytes travel anyway."""
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes()
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
