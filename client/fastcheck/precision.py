"""What a trainer allows to be lost, in the words that it says it in. Pure."""

from __future__ import annotations

import re

from fastcheck_proto.v1 import layout_pb2 as pb

from .errors import InvalidArgumentError

_MOMENTUM: dict[str, pb.MomentumCoding.ValueType] = {
    "exact": pb.MOMENTUM_CODING_EXACT,
    "index8": pb.MOMENTUM_CODING_INDEX8,
    "index4": pb.MOMENTUM_CODING_INDEX4,
}
_BOUNDED = re.compile(r"bounded\(([0-9.eE+-]{1,32})\)", re.ASCII)


def parse_precision(momentum: str, weights: str) -> pb.Precision | None:
    """The message for `momentum` and `weights`; None when both are "exact".

    Raises:
        InvalidArgumentError: either is none of the words that `Checkpointer` takes.
    """
    if not isinstance(momentum, str) or momentum not in _MOMENTUM:
        raise InvalidArgumentError(f'momentum = {momentum!r} must be "exact", "index8" or "index4"')
    bound = _bound(weights)
    if momentum == "exact" and not bound:
        return None
    return pb.Precision(momentum=_MOMENTUM[momentum], weights_bound=bound)


def _bound(weights: str) -> float:
    """Largest error in standard deviations; 0 for "exact"."""
    if weights == "exact":
        return 0.0
    found = _BOUNDED.fullmatch(weights) if isinstance(weights, str) else None
    try:
        bound = float(found.group(1)) if found else 0.0
    except ValueError:
        bound = 0.0
    if not 0 < bound <= 1:
        raise InvalidArgumentError(
            f'weights = {weights!r} must be "exact" or "bounded(x)" with x above 0 and at most 1, '
            'like "bounded(1e-3)"'
        )
    return bound
