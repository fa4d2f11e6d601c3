"""Whether a lossy resume ends where the exact one does, measured against the noise between seeds.

Differences are paired: a seed's lossy and exact resumes see the same batches and the same validation text, so what
luck they share cancels, and a hundredth of the noise between seeds can be told from nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

#: A setting may move the validation loss by so much of the noise between seeds.
SHARE_OF_NOISE = 0.01
CONTROL = "control: moments dropped"


@dataclass(frozen=True)
class Outcome:
    """What one way to resume did to the validation loss, seed by seed, in nats against the exact resume."""

    name: str
    differences: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """What the setting does on average."""
        return statistics.mean(self.differences)

    @property
    def error(self) -> float:
        """Standard error of that."""
        return statistics.stdev(self.differences) / len(self.differences) ** 0.5

    @property
    def typical(self) -> float:
        """Median size of a seed's difference."""
        return statistics.median([abs(difference) for difference in self.differences])


@dataclass(frozen=True)
class Experiment:
    """All seeds."""

    exact: list[float]
    outcomes: list[Outcome]

    @property
    def noise(self) -> float:
        """Standard deviation of the exact runs' validation loss between seeds, in nats."""
        return statistics.stdev(self.exact)

    def passes(self, outcome: Outcome) -> bool:
        """Whether it moves the validation loss by at most its share of the noise, in most seeds and on average."""
        bound = SHARE_OF_NOISE * self.noise
        return outcome.typical <= bound and abs(outcome.mean) <= bound

    def to_json(self) -> dict[str, Any]:
        """Every run, and what the table shows."""
        outcomes = [
            asdict(o) | {"mean": o.mean, "error": o.error, "typical": o.typical, "passes": self.passes(o)}
            for o in self.outcomes
        ]
        return {"exact": self.exact, "noise": self.noise, "outcomes": outcomes}


def print_experiment(experiment: Experiment) -> None:
    """One row per setting."""
    noise = experiment.noise
    table = Table(
        title=f"Validation loss after a lossy resume against the exact one, {len(experiment.exact)} seeds; "
        f"noise between seeds {noise:.2e} nats"
    )
    for column in (
        "resumed from",
        "median |difference|",
        "mean difference",
        "largest",
        f"<= {SHARE_OF_NOISE:.0%} of noise",
    ):
        table.add_column(column)
    for outcome in experiment.outcomes:
        largest = max(map(abs, outcome.differences))
        table.add_row(
            outcome.name,
            f"{outcome.typical:.1e} ({outcome.typical / noise:.2%} of noise)",
            f"{outcome.mean:+.1e} +- {outcome.error:.0e} ({outcome.mean / noise:+.2%})",
            f"{largest:.1e} ({largest / noise:.2%})",
            "pass" if experiment.passes(outcome) else "FAIL",
        )
    Console(width=170).print(table)
    control = next(outcome for outcome in experiment.outcomes if outcome.name == CONTROL)
    if experiment.passes(control):
        print("The control passes: this experiment cannot tell a good setting from a bad one.")
