"""Single tensors: which can be saved, when two are the same view, and copying one exactly into another.

Bits are moved by a plain dtype of equal size. That works for dtypes that have no kernels of their own (float4, bits8)
and never looks at the value, so NaN payloads and signed zeros stay as they are.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.nn.parameter import is_lazy

from .sharding import is_dtensor, local_of

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
DTYPES: dict[str, torch.dtype] = _known()
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """The dtype's name on the wire, None when it cannot be saved."""
    return _NAMES.get(dtype)


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype of the same size that every copy kernel knows.

    The tensor must not be a lazy conjugate or negative view: resolve those first.
    """
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def why_unsupported(tensor: torch.Tensor) -> str | None:  # noqa: PLR0911  one refusal per kind
    """What keeps this tensor from being saved or filled, as the end of a sentence; None if nothing does."""
    if is_lazy(tensor):
        return "is an uninitialised parameter: run one forward pass first"
    if is_dtensor(tensor):
        return why_unsupported(local_of(tensor))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor subclass that FastCheck "
            "does not know: put the plain tensors inside it into the state"
        )
    if tensor.is_quantized:
        return "is a quantized tensor: put its int_repr(), scale and zero point into the state"
    if tensor.is_nested:
        return "is a nested tensor: put its values() and offsets into the state"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}: put its indices and values into the state"
    if tensor.device.type == "meta":
        return "is on the meta device and has no bytes: materialise it first (to_empty)"
    if dtype_name(tensor.dtype) is None:
        return f"has dtype {tensor.dtype}, which cannot be saved"
    return None


def view_key(tensor: torch.Tensor) -> tuple[int, tuple[Hashable, ...]]:
    """Equal for two plain tensors exactly when they are the same view of the same memory.

    The address, and how what lies there is seen.
    """
    return (
        tensor.data_ptr(),
        (
            tensor.device,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        ),
    )


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two CPU tensors of the same shape and dtype agree bit for bit."""
    # complex128's carrier compares by value, so look at its halves as integers.
    a, b = carrier(one), carrier(other)
    if a.dtype is torch.complex128:
        a, b = torch.view_as_real(a).view(torch.int64), torch.view_as_real(b).view(torch.int64)
    return bool(torch.equal(a, b))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether it keeps many elements in one place."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_repeated(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `source` is constant where `target` (an expanded tensor) keeps many elements in one place."""
    single = _single(source, target)
    return single is source or equal_bits(source, single.expand(source.shape))


def copy_exact(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bits into a plain tensor of the same shape and dtype, on any device, however it is strided."""
    into = target.detach()
    with torch.no_grad():
        if into.is_conj() or into.is_neg():
            into.copy_(source)
            return
        source = _single(source, into)
        into = _single(into, into)
        carrier(into).copy_(carrier(source))


def _single(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` cut to one element along each dimension in which `like` is expanded."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
