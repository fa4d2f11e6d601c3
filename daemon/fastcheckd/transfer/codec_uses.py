"""How much went by which codec: sums over the chunks of a shard. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ..codec.encoder import Use


def raw_use(size_bytes: int) -> tuple[Use, ...]:
    """A chunk that went as it is."""
    return (Use("raw", size_bytes, size_bytes),)


def summed(uses: Iterable[Use]) -> tuple[Use, ...]:
    """One `Use` for each codec, by name."""
    sums: dict[str, tuple[int, int]] = {}
    for use in uses:
        raw, encoded = sums.get(use.codec, (0, 0))
        sums[use.codec] = raw + use.raw_bytes, encoded + use.encoded_bytes
    return tuple(Use(codec, raw, encoded) for codec, (raw, encoded) in sorted(sums.items()))
