"""The arithmetic of the paper's experiment: reductions, ceilings, and what is to be reached. Pure.

A reduction is what a baseline's time shrinks by, in percent: the paper's figures are reductions of 78.42 (checkpoint)
and 77.41 (recovery) at best. Which link is the limit decides what can be gained at all: a sender whose own link is the
limit gains nothing from many receivers, only from sending less. So every goal names its links.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAPER_CHECKPOINT, PAPER_RECOVERY = 78.42, 77.41

#: TCP's payload in a packet of 1500 bytes with timestamps, of what such a packet takes up on a shaped link.
PAYLOAD_SHARE = 1448 / 1514

#: What is compared. OURS: codec on, many holders; INDEX8: the same with lossy moments; COPY: codec off, one holder;
#: REMOTE: torch.distributed.checkpoint to a server.
OURS, INDEX8, COPY, REMOTE = "ours", "index8", "one copy", "remote"
BASELINES = (COPY, REMOTE)

#: Whose links are the limit. EQUAL: all links are the same, so for a recovery the receiver's own link is the limit.
#: HOLDERS: the link of the node that is watched is as fast as all others together.
EQUAL, HOLDERS = "equal", "holders"

CHECKPOINT, TOGETHER, RECOVERY = "checkpoint", "checkpoint of all ranks", "recovery"


def payload_ceiling_bytes_per_s(gbit_per_s: float) -> float:
    """Most that a link of that rate carries of anybody's bytes."""
    return gbit_per_s * 1e9 / 8 * PAYLOAD_SHARE


def reduction_percent(candidate_s: float, baseline_s: float) -> float:
    """By how much less time the candidate takes than the baseline; negative when it takes more."""
    return (1 - candidate_s / baseline_s) * 100


def possible_reduction_percent(gain: float) -> float:
    """What `gain` times as many holders, or as few bytes, could reduce a time by at most."""
    return (1 - 1 / gain) * 100


@dataclass(frozen=True)
class Where:
    """The circumstances that runs have in common."""

    nodes: int
    gbit_per_s: float
    links: str
    #: Steps that the models were trained for.
    stage: int
    #: Of a scale model: the true rate over the one that it stands for.
    link_scale: float = 1.0

    @property
    def holders(self) -> int:
        """All other nodes: over so many the watched one's state is spread."""
        return self.nodes - 1

    def __str__(self) -> str:
        limit = "equal links" if self.links == EQUAL else "holders' links the limit"
        rate = f"{self.gbit_per_s:g} Gbit/s"
        if self.link_scale != 1:
            rate += f" (scale model of {self.gbit_per_s / self.link_scale:g})"
        return f"{self.nodes} nodes, {rate}, {limit}, step {self.stage}"


@dataclass(frozen=True)
class Run:
    """One save or load. Bytes are those that crossed the watched node's network interface."""

    what: str
    system: str
    seconds: float
    state_bytes: int
    sent_bytes: int
    received_bytes: int
    #: Cores of the machine that were busy meanwhile, all nodes' together.
    cores_busy: float
    #: Of the round; runs with the same one took turns.
    round: int


def goal_percent(what: str, system: str, where: Where) -> float | None:
    """The reduction against the better baseline that is to be reached there, if one was set."""
    if what == CHECKPOINT and system == OURS:
        return 85.0 if where.links == HOLDERS else 70.0
    if what == RECOVERY and where.links == HOLDERS:
        return {(OURS, 4): 78.0, (INDEX8, 4): 85.0, (OURS, 7): 86.0}.get((system, where.holders))
    return None


@dataclass(frozen=True)
class Comparison:
    """A system against the baselines, in the same rounds on the same links."""

    where: Where
    what: str
    system: str
    runs: Sequence[Run]
    #: Baseline → its runs; one that was not run is missing.
    baselines: Mapping[str, Sequence[Run]]

    @property
    def seconds(self) -> float:
        """Median."""
        return _median_s(self.runs)

    @property
    def better_baseline(self) -> str:
        """The one with the lower median."""
        return min(self.baselines, key=lambda name: _median_s(self.baselines[name]))

    def reduction(self, baseline: str) -> float:
        """Percent, of the medians."""
        return reduction_percent(self.seconds, _median_s(self.baselines[baseline]))

    def reductions(self, baseline: str) -> list[float]:
        """Percent, round by round: what the spread is taken from."""
        others = {run.round: run.seconds for run in self.baselines[baseline]}
        return [reduction_percent(run.seconds, others[run.round]) for run in self.runs if run.round in others]

    @property
    def goal(self) -> float | None:
        """Percent, against the better baseline."""
        return goal_percent(self.what, self.system, self.where)

    @property
    def met(self) -> bool | None:
        """Whether the goal is; None without one."""
        return None if self.goal is None else self.reduction(self.better_baseline) >= self.goal

    @property
    def paper(self) -> float:
        """The paper's best."""
        return PAPER_RECOVERY if self.what == RECOVERY else PAPER_CHECKPOINT

    @property
    def moved_bytes(self) -> float:
        """Median of what crossed the watched node's interface in the direction that the state went."""
        return statistics.median(r.received_bytes if r.what == RECOVERY else r.sent_bytes for r in self.runs)

    @property
    def codec_ratio(self) -> float:
        """State bytes per byte that crossed the network."""
        return self.runs[0].state_bytes / self.moved_bytes

    @property
    def possible(self) -> float:
        """Percent: most that a single copy's time could shrink by, with these links and so few bytes."""
        many = self.where.holders if self.where.links == HOLDERS and self.what != TOGETHER else 1
        return possible_reduction_percent(many * self.codec_ratio)

    @property
    def ceiling_share(self) -> float | None:
        """Received bytes per second, of what the receiver's link can carry. Only where that is the limit.

        0.95 is the goal. The same as the state's rate over ceiling times codec ratio.
        """
        if self.what != RECOVERY or self.where.links != EQUAL:
            return None
        ceiling = payload_ceiling_bytes_per_s(self.where.gbit_per_s)
        return statistics.median(run.received_bytes / run.seconds for run in self.runs) / ceiling

    @property
    def holders_gain(self) -> float | None:
        """Received bytes per second from all holders, over those from one. Only where their links are the limit."""
        if self.what != RECOVERY or self.where.links != HOLDERS or COPY not in self.baselines:
            return None
        one = statistics.median(run.received_bytes / run.seconds for run in self.baselines[COPY])
        return statistics.median(run.received_bytes / run.seconds for run in self.runs) / one

    def to_json(self) -> dict[str, Any]:
        """Every run, and what the table shows."""
        return {
            "where": dataclasses.asdict(self.where),
            "what": self.what,
            "system": self.system,
            "runs": [dataclasses.asdict(run) for run in self.runs],
            "baselines": {
                name: [dataclasses.asdict(run) for run in runs] for name, runs in self.baselines.items()
            },
            "seconds": self.seconds,
            "reductions_percent": {name: self.reduction(name) for name in self.baselines},
            "better_baseline": self.better_baseline,
            "goal_percent": self.goal,
            "met": self.met,
            "paper_percent": self.paper,
            "codec_ratio": self.codec_ratio,
            "possible_percent": self.possible,
            "ceiling_share": self.ceiling_share,
            "holders_gain": self.holders_gain,
        }


def compare(where: Where, runs: Sequence[Run]) -> list[Comparison]:
    """Everything that can be compared of the runs of one place; a system is left out where no baseline was run."""
    found = []
    for what in dict.fromkeys(run.what for run in runs):
        of = [run for run in runs if run.what == what]
        baselines = {name: own for name in BASELINES if (own := [r for r in of if r.system == name])}
        for system in (OURS, INDEX8):
            if (own := [run for run in of if run.system == system]) and baselines:
                found.append(Comparison(where, what, system, own, baselines))
    return found


def _median_s(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)
