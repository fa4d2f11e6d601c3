"""The named precisions of `Checkpointer(precision=...)` and what each allows the daemon's codec to lose. Pure."""

from __future__ import annotations

from fastcheck_proto.v1 import layout_pb2 as pb

from .errors import InvalidArgumentError

EXACT = "exact"
#: "momentum8": optimizer moments as 8-bit codes, one scale per block. "compact": 4-bit codes, and parameters within a
#: thousandth of a standard deviation. Both stay far below the noise between seeds (docs/benchmarks.md).
_LOSSY = {
    "momentum8": pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX8),
    "compact": pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX4, weights_bound=1e-3),
}


def parse_precision(name: str) -> pb.Precision | None:
    """The message for a named precision; None for "exact".

    Raises:
        InvalidArgumentError: there is no precision of that name.
    """
    if name == EXACT:
        return None
    if not isinstance(name, str) or name not in _LOSSY:
        raise InvalidArgumentError(
            f"precision = {name!r} must be one of {', '.join(map(repr, (EXACT, *_LOSSY)))}"
        )
    return _LOSSY[name]
