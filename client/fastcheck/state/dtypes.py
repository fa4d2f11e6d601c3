"""Names of dtypes on the wire, and a plain dtype of equal size to move each one's bits by. Pure.

Copying through a carrier dtype works for dtypes that have no kernels of their own (float4, bits8) and
never looks at the value, so NaN payloads and signed zeros stay as they are.
"""

from __future__ import annotations

import torch

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _known() -> dict[str, torch.dtype]:
    found = {}
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            name = str(value).removeprefix("torch.")
            # Quantized dtypes (qint8, quint4x2, ...) mean nothing without their scales.
            if not name.startswith(("qint", "quint")) and value.itemsize in _CARRIERS:
                found[name] = value
    return found


#: Every dtype that this torch can hold, by the name it has on the wire.
BY_NAME: dict[str, torch.dtype] = _known()
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}


def name_of(dtype: torch.dtype) -> str | None:
    """The dtype's name on the wire, None when it cannot be saved."""
    return _NAMES.get(dtype)


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype of the same size that every copy kernel knows.

    The tensor must not be a lazy conjugate or negative view: resolve those first.
    """
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])
