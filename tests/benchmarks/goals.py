"""What the codec is to reach, by kind of training, as it was set before anything was measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """At least so much: original over encoded bytes, and 10^9 original bytes per second of one core; 0: no goal."""

    ratio: float
    encode_gbps: float = 0.0
    decode_gbps: float = 0.0

    def missed(self, ratio: float, encode_gbps: float, decode_gbps: float) -> list[str]:
        """What falls short, in words; empty when the goal is met."""
        wanted = (
            ("ratio", ratio, self.ratio),
            ("encode GB/s", encode_gbps, self.encode_gbps),
            ("decode GB/s", decode_gbps, self.decode_gbps),
        )
        return [f"{what} {value:.4g} instead of {goal:.3g}" for what, value, goal in wanted if value < goal]


#: By name of the sequence; for a gap of one step.
ADJACENT = {
    "AdamW, fp32": Goal(3.5, 1.0, 1.5),
    "AdamW, bf16 with fp32 master": Goal(4.0, 1.0, 1.5),
    "SGD with momentum": Goal(2.3, 1.0, 1.5),
    "bf16 weights alone, lr 5e-4": Goal(3.9, 0.6, 1.0),
    "bf16 weights alone, lr 6e-5": Goal(8.0, 0.6, 1.0),
    "embedding, sparse rows": Goal(100.0, 3.0, 4.0),
}
#: For a gap of ten steps, whatever the kind.
DISTANT = Goal(1.3)
#: Moments as 4-bit indexes and bounded weights, ten steps apart.
DISTANT_LOSSY = Goal(5.5)


def goal_of(name: str, gap: int, lossy: bool) -> Goal | None:
    """The goal that a pair of snapshots has, if it has one."""
    if lossy:
        return DISTANT_LOSSY if gap > 1 else None
    return ADJACENT[name] if gap == 1 else DISTANT
