"""The demo's figures and its comparison of runs, from the ranks' events. Pure: no clocks, no processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


@dataclass
class RunRecord:
    """The events of one run's ranks (or of one part of it, before or after the loss)."""

    #: (step, rank) → loss as float hex.
    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    #: rank → digest of its state after the last step.
    final: dict[int, str] = field(default_factory=dict)
    #: rank → (step, digest) right after `load`.
    loaded: dict[int, tuple[int | None, str | None]] = field(default_factory=dict)
    #: rank → digest after the step asked for.
    probed: dict[int, str] = field(default_factory=dict)
    stalls_ms: list[float] = field(default_factory=list)
    memcpys_ms: list[float] = field(default_factory=list)
    #: Of each save, without waiting and without the calls to the daemon: the copying alone.
    stages_ms: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    loaded_at_s: list[float] = field(default_factory=list)
    bytes_raw: int = 0
    bytes_sent: int = 0
    committed_step: int = 0
    params: int = 0
    #: rank → when its first step was done, on the machine's monotonic clock.
    first_step_at_s: dict[int, float] = field(default_factory=dict)
    #: Steps whose loss was computed twice with different results.
    conflicts: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """State bytes over bytes sent, of all committed saves so far."""
        return self.bytes_raw / self.bytes_sent if self.bytes_sent else None

    def take(self, event: Event) -> None:
        """Add one event of a rank."""
        rank = event["rank"]
        match event["event"]:
            case "ready":
                self.params = event["params"]
            case "loaded":
                self.loaded[rank] = (event["step"], event["digest"])
                self.load_s.append(event["load_s"])
                self.loaded_at_s.append(event["at_s"])
            case "step":
                self._take_step(event)
            case "digest":
                self.probed[rank] = event["digest"]
            case "saved" if event["committed"]:
                self.bytes_raw += event["bytes"]
                self.bytes_sent += event["encoded_bytes"]
                self.stages_ms.append(event["stage_ms"])
                self.committed_step = max(self.committed_step, event["step"])
            case "done":
                self.final[rank] = event["digest"]

    def _take_step(self, event: Event) -> None:
        key = (event["step"], event["rank"])
        if self.losses.setdefault(key, event["loss"]) != event["loss"]:
            self.conflicts.append(event["step"])
        self.first_step_at_s.setdefault(event["rank"], event["at_s"])
        # A rank's first save maps fresh memory, and its first copy only makes the yardstick.
        if event["memcpy_ms"]:
            self.stalls_ms.append(event["stall_ms"])
            self.memcpys_ms.append(event["memcpy_ms"])


@dataclass(frozen=True)
class Comparison:
    """Whether the interrupted run ended as the uninterrupted one; `reasons` says where not."""

    bit_identical: bool
    losses_identical: bool
    reasons: tuple[str, ...]


def compare(
    before: RunRecord, after: RunRecord, reference: RunRecord, *, ranks: int, steps: int
) -> Comparison:
    """Compare a run that lost a node with one that did not.

    Args:
        before: until the loss.
        after: from the restore to the end.
        reference: the whole run, undisturbed, probed at the restored step.
        ranks: number of ranks.
        steps: number of the last step.
    """
    reasons: list[str] = []
    restored = {step for step, _ in after.loaded.values()}
    if len(after.loaded) != ranks or len(restored) != 1 or None in restored:
        reasons.append(f"the ranks did not all load one step: {dict(sorted(after.loaded.items()))}")
    elif (step := restored.pop()) is not None and step < before.committed_step:
        reasons.append(f"step {step} was loaded, but step {before.committed_step} had been committed")
    for rank in range(ranks):
        if (after.loaded.get(rank) or (None, None))[1] != reference.probed.get(rank, ""):
            reasons.append(f"rank {rank}'s loaded state differs from the reference's at that step")
        if after.final.get(rank) != reference.final.get(rank, ""):
            reasons.append(f"rank {rank}'s final state differs from the reference's")
    bits = not reasons
    wrong_losses = sorted(_differing_steps([before, after], reference, ranks=ranks, steps=steps))
    if wrong_losses:
        reasons.append(f"losses differ from the reference's at steps {', '.join(map(str, wrong_losses))}")
    return Comparison(bits, not wrong_losses, tuple(reasons))


def _differing_steps(parts: Iterable[RunRecord], reference: RunRecord, *, ranks: int, steps: int) -> set[int]:
    wrong: set[int] = set()
    seen: set[tuple[int, int]] = set()
    for part in parts:
        wrong |= set(part.conflicts)
        wrong |= {key[0] for key, loss in part.losses.items() if reference.losses.get(key) != loss}
        seen |= set(part.losses)
    wrong |= {step for step in range(1, steps + 1) for rank in range(ranks) if (step, rank) not in seen}
    return wrong


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When the loss happened and was noticed, on the machine's monotonic clock."""

    killed_at_s: float
    detected_at_s: float


def summary(
    before: RunRecord,
    after: RunRecord,
    comparison: Comparison,
    timeline: Timeline,
    *,
    nodes: int,
    ranks: int,
    steps: int,
    killed_node: str,
    killed_at_step: int,
) -> dict[str, Any]:
    """The demo's result as `fastcheck demo -o json` prints it.

    `recovery_s` is the sum of `detection_s` (kill to DOWN), `restart_s` (until every process is up again),
    `load_s` and `first_step_s`. `save_stall_ms`, of which `save_copy_ms` is the copying, and `memcpy_ms` are
    medians over all ranks and steps, the first of each process left out.
    """
    raw = before.bytes_raw + after.bytes_raw
    sent = before.bytes_sent + after.bytes_sent
    # Ranks load side by side and step in lockstep: the last one counts.
    load_s = max(after.load_s, default=0.0)
    loaded_at_s = max(after.loaded_at_s, default=timeline.detected_at_s)
    first_step_at_s = max(after.first_step_at_s.values(), default=loaded_at_s)
    return {
        "nodes": nodes,
        "ranks": ranks,
        "params": before.params,
        "steps": steps,
        "killed_node": killed_node,
        "killed_at_step": killed_at_step,
        "committed_step": before.committed_step,
        "restored_step": next((step for step, _ in after.loaded.values()), None),
        "bit_identical": comparison.bit_identical,
        "losses_identical": comparison.losses_identical,
        "save_stall_ms": _median(before.stalls_ms + after.stalls_ms),
        "save_copy_ms": _median(before.stages_ms + after.stages_ms),
        "memcpy_ms": _median(before.memcpys_ms + after.memcpys_ms),
        "recovery_s": round(first_step_at_s - timeline.killed_at_s, 3),
        "detection_s": round(timeline.detected_at_s - timeline.killed_at_s, 3),
        "restart_s": round(loaded_at_s - load_s - timeline.detected_at_s, 3),
        "load_s": round(load_s, 3),
        "first_step_s": round(first_step_at_s - loaded_at_s, 3),
        "bytes_raw": raw,
        "bytes_sent": sent,
        "ratio": round(raw / sent, 4) if sent else None,
        "differences": list(comparison.reasons),
    }


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
