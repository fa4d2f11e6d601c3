"""What the soak saw and what was promised: counts, violations, and what each kind of process takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

#: A call that takes longer than this hangs.
HANG_S = 30.0
#: Of a kind of process, the last quarter's largest figure may be so many times that of the second quarter.
GROWTH_MAX = 1.5


@dataclass
class Account:
    """Of one run. Thread-safe as far as it only appends and counts."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    loads: int = 0
    failed_saves: Counter[str] = field(default_factory=Counter)
    failed_loads: Counter[str] = field(default_factory=Counter)
    #: What was promised and not kept: kind → sentences.
    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: Digest of what a rank saved as a step: what every load of it must give.
    saved: dict[tuple[int, int], str] = field(default_factory=dict)
    #: Newest step that some rank was told is committed.
    committed: int = 0
    #: By minute: kind of process and figure → the largest one seen.
    sizes: dict[int, dict[tuple[str, str], float]] = field(default_factory=lambda: defaultdict(dict))

    def violated(self, kind: str, what: str) -> None:
        """A promise was broken."""
        self.violations[kind].append(what)

    def saving(self, rank: int, step: int, digest: str) -> None:
        """A rank saves. Its trajectory follows from its number, so a step always has the same bytes."""
        before = self.saved.setdefault((rank, step), digest)
        if before != digest:
            self.violated(
                "wrong bytes", f"rank {rank} trains from other bytes than it once saved: step {step}"
            )

    def loaded(self, steps: list[int | None], digests: list[str], floor: int) -> None:
        """All ranks have loaded; `floor` was the newest committed step before they were started."""
        self.loads += len(steps)
        if len(set(steps)) != 1:
            self.violated("mixed steps", f"ranks loaded {steps}")
        for rank, (step, digest) in enumerate(zip(steps, digests, strict=True)):
            if (step or 0) < floor:
                self.violated("lost steps", f"rank {rank} loaded {step} although {floor} was committed")
            if step is not None and self.saved.get((rank, step)) != digest:
                self.violated("wrong bytes", f"rank {rank} loaded other bytes than it saved as step {step}")

    def sized(self, minute: int, kind: str, **figures: float) -> None:
        """What a process of a kind takes at this moment."""
        for name, value in figures.items():
            at = self.sizes[minute]
            at[kind, name] = max(at.get((kind, name), 0.0), value)

    def growth(self) -> dict[str, tuple[float, float]]:
        """Of each kind of process and figure: the largest of the run's second quarter, and of its last."""
        minutes = sorted(self.sizes)
        if len(minutes) < 8:
            return {}
        quarter = len(minutes) // 4
        second, last = minutes[quarter : 2 * quarter], minutes[-quarter:]
        names = sorted({name for minute in minutes for name in self.sizes[minute]})
        return {
            f"{kind} {what}": (
                max(self.sizes[m].get((kind, what), 0.0) for m in second),
                max(self.sizes[m].get((kind, what), 0.0) for m in last),
            )
            for kind, what in names
        }

    def close(self) -> None:
        """At the end: what has grown is a violation as well."""
        for what, (before, after) in self.growth().items():
            if before and after > GROWTH_MAX * before:
                self.violated("growth", f"{what}: {before:g}, at the end {after:g}")

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "seed": self.seed,
            "faults": sum(self.faults.values()),
            "faults_by_kind": dict(self.faults.most_common()),
            "commits": self.commits,
            "loads": self.loads,
            "failed_saves": dict(self.failed_saves.most_common()),
            "failed_loads": dict(self.failed_loads.most_common()),
            "violations": {kind: found[:20] for kind, found in self.violations.items()},
            "growth": {what: list(pair) for what, pair in self.growth().items()},
        }
