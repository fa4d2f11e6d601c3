"""What the codec's benchmark found out, one row per pair of snapshots, the goals, and the tables."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Rate:
    """CPU seconds of each round for so many original bytes."""

    raw_bytes: int
    rounds_s: list[float] = field(default_factory=list)

    @property
    def gbps(self) -> float:
        """Median."""
        return self.raw_bytes / statistics.median(self.rounds_s) / 1e9

    def __str__(self) -> str:
        low, high = (self.raw_bytes / s / 1e9 for s in (max(self.rounds_s), min(self.rounds_s)))
        return f"{self.gbps:.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Row:
    """One pair of snapshots, encoded."""

    name: str
    base_step: int
    step: int
    lossy: bool
    #: Chunks that hold tensors, and all chunks (the state header, in chunks of its own, included).
    tensor_chunks_bytes: int
    tensor_chunks_encoded_bytes: int
    raw_bytes: int
    encoded_bytes: int
    #: The caller's tensors alone; the rest of the tensors' chunks are gaps for alignment.
    tensor_bytes: int
    #: How many runs are a single number: step counters and the like; they count among the tensors.
    scalars: int
    reverse_bytes: int
    #: Original and encoded bytes by codec; "(as it is)": chunks that would not shrink.
    shares: dict[str, tuple[int, int]]
    encode: Rate
    decode: Rate
    reverse: Rate
    memcpy: Rate
    peers: dict[str, tuple[float, Rate, Rate]]
    goal: Goal | None
    loss: float

    @property
    def ratio(self) -> float:
        """Of the tensors' chunks; what the goal is about."""
        return self.tensor_chunks_bytes / self.tensor_chunks_encoded_bytes

    @property
    def whole_ratio(self) -> float:
        """Of everything that is sent."""
        return self.raw_bytes / self.encoded_bytes

    @property
    def missed(self) -> list[str]:
        """Goals that are not reached."""
        return self.goal.missed(self.ratio, self.encode.gbps, self.decode.gbps) if self.goal else []

    def to_json(self) -> dict[str, Any]:
        """Every run, and what the table shows."""
        return asdict(self) | {"ratio": self.ratio, "whole_ratio": self.whole_ratio, "missed": self.missed}


def print_rows(rows: list[Row]) -> None:
    """The codec against its goals, then the peers, then what was missed."""
    console = Console(width=190)
    table = Table(
        title="The codec on real training states (one core; GB/s of original bytes: median, lowest to highest)"
    )
    for column in (
        "state", "steps", "MB (header: kB, encoded)", "ratio: tensors (whole)",
        "encode GB/s", "decode GB/s", "of a copy",
        "reverse delta, of raw; GB/s", "by codec: share of bytes, ratio", "goal", "met",
    ):  # fmt: skip
        table.add_column(column)
    for row in rows:
        copies = f"1/{row.memcpy.gbps / row.encode.gbps:.0f}, 1/{row.memcpy.gbps / row.decode.gbps:.0f}"
        header = row.raw_bytes - row.tensor_chunks_bytes
        encoded = row.encoded_bytes - row.tensor_chunks_encoded_bytes
        goal = row.goal
        table.add_row(
            row.name + ", lossy" * row.lossy,
            f"{row.base_step} -> {row.step}",
            f"{row.raw_bytes / 1e6:.1f} ({header / 1e3:.0f}, {encoded / 1e3:.1f})",
            f"{row.ratio:.2f} ({row.whole_ratio:.2f})",
            str(row.encode),
            str(row.decode),
            copies,
            f"1/{row.raw_bytes / row.reverse_bytes:.2f}; {row.reverse}",
            ", ".join(
                f"{n} {r / row.raw_bytes:.0%} {r / max(e, 1):.3g}x" for n, (r, e) in row.shares.items()
            ),
            f"{goal.ratio:g}; {goal.encode_gbps:g}/{goal.decode_gbps:g}" if goal else "",
            "" if goal is None else "no" if row.missed else "yes",
        )
    console.print(table)
    peers = Table(
        title="Others on the same bytes in the same run, chunk by chunk (ratio; compress / decompress GB/s, medians)"
    )
    for column in ("state", "steps", "FastCheck", *rows[0].peers, "copy"):
        peers.add_column(column)
    for row in rows:
        peers.add_row(
            row.name + ", lossy" * row.lossy,
            f"{row.base_step} -> {row.step}",
            f"{row.whole_ratio:.2f}; {row.encode.gbps:.2f} / {row.decode.gbps:.2f}",
            *(f"{ratio:.2f}; {c.gbps:.2f} / {d.gbps:.2f}" for ratio, c, d in row.peers.values()),
            f"{row.memcpy.gbps:.1f}",
        )
    console.print(peers)
    for row in rows:
        for what in row.missed:
            console.print(
                f"NOT MET  {row.name}{', lossy' * row.lossy}, {row.base_step} -> {row.step}: {what}"
            )
    met = sum(1 for row in rows if row.goal and not row.missed)
    console.print(f"{met} of {sum(1 for row in rows if row.goal)} rows with a goal meet it")


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
