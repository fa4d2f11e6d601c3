"""`--only paper`: the FastCheck paper's experiment, on links that are shaped to its rates. Needs root, for namespaces.

The same bytes over the same links, in rounds that take turns: our system (codec on, spread over all other nodes), our
own lane with the codec off and one holder (a single copy in another node's memory, as Gemini keeps it), and
torch.distributed.checkpoint to a storage server. The state is that of models in training, after each step.

The full run takes about an hour and a quarter, with nothing else running, and the first one a quarter of an hour more
to train the models; `--quick` a few minutes: 4 nodes, one rate, small states, to see that it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.netlab.wires import why_not

from . import paper_storage
from .paper_goals import (
    CHECKPOINT,
    COPY,
    EQUAL,
    HOLDERS,
    INDEX8,
    OURS,
    RECOVERY,
    REMOTE,
    TOGETHER,
    Comparison,
    Run,
    Where,
    compare,
)
from .paper_site import Site
from .paper_training import train_all

Say = Callable[[str], None]

#: Steps of a job that are saved before anything is measured: first steps find cold memory and no base.
WARM_UP = 2
#: Trainings at once: one per core of the smallest machine that this is run on.
TRAININGS = 2
SERVER_PYTHON = Path(".venv-paper/bin/python")
CEILING_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """What is run; the defaults are the full experiment."""

    #: Nodes → the layouts. 5 nodes are 4 holders, of which one of the goals speaks.
    layouts: dict[int, tuple[str, ...]] = field(
        default_factory=lambda: {4: (EQUAL, HOLDERS), 5: (HOLDERS,), 8: (EQUAL, HOLDERS)}
    )
    #: What links are to stand for, and how fast they are of that. Less than 1 is a scale model: where all nodes share
    #: few cores, links that are slower in the same proportion leave each Gbit/s as many cores as real nodes have.
    gbits_per_s: tuple[float, ...] = (1.0, 2.5)
    link_scale: float = 1.0
    stages: tuple[int, ...] = (10, 200, 600)
    #: Models in the watched rank's state, 40 MB each. Where all ranks save at once each has one.
    models: int = 6
    rounds: int = 5
    recoveries: int = 3
    codec: str = "always"
    ram_budget: str = "4GiB"
    states: Path = Path("build/paper-states")

    @property
    def seeds(self) -> list[int]:
        """Of all models that are needed."""
        return list(range(max(self.models, *self.layouts)))


def quick(states: Path) -> Plan:
    """Only shows that it runs."""
    return Plan(
        layouts={4: (EQUAL, HOLDERS)},
        gbits_per_s=(1.0,),
        stages=(3,),
        models=1,
        rounds=2,
        recoveries=1,
        ram_budget="1GiB",
        states=states,
    )


class Experiment:
    """The runs at one site."""

    def __init__(self, plan: Plan, site: Site, say: Say) -> None:
        self._plan, self._site, self._say = plan, site, say
        self._step = 0
        self._checkpoint = ""
        self._state_bytes = 0

    def comparisons(self) -> Iterator[Comparison]:
        """All layouts, rates and stages of this number of nodes."""
        count = len(self._site.nodes)
        for rate in self._plan.gbits_per_s:
            for links in self._plan.layouts[count]:
                for stage in self._plan.stages:
                    scale = self._plan.link_scale
                    where = Where(count, rate * scale, links, stage, scale)
                    self._say(f"{where}:")
                    # Wiped nodes come back, and models are taken up, before the links are shaped.
                    self._site.network.heal()
                    runs = list(self._runs(where))
                    yield from compare(where, runs)

    def _runs(self, where: Where) -> Iterator[Run]:
        seeds = list(range(self._plan.models))
        self._state_bytes = self._site.ask("take_up", seeds=seeds, stage=where.stage)["state_bytes"]
        self._site.shape(where.gbit_per_s, where.links)
        yield from self._saves()
        yield from self._recoveries()
        if where.links == EQUAL and where.stage == self._plan.stages[-1]:
            yield from self._saves_together(where.stage)

    def _systems(self, turn: int) -> list[str]:
        """Who saves, each time another one first."""
        systems = [OURS, COPY, *([REMOTE] if self._site.storage else [])]
        return systems[turn % len(systems) :] + systems[: turn % len(systems)]

    def _saves(self) -> Iterator[Run]:
        for turn in range(-WARM_UP, self._plan.rounds):
            self._site.ask("train")
            self._step += 1
            for system in self._systems(turn):
                answer = self._save(system)
                if turn >= 0:
                    yield self._run(CHECKPOINT, system, turn, answer)
        self._save(INDEX8)  # what its recovery needs

    def _save(self, system: str) -> dict[str, Any]:
        if system == REMOTE:
            return self._site.ask("remote_save", **self._remote_target())
        return self._site.ask("save", step=self._step, **self._target(system))

    def _recoveries(self) -> Iterator[Run]:
        for turn in range(self._plan.recoveries):
            for system in [*self._systems(turn), INDEX8]:
                if system == REMOTE:
                    answer = self._site.ask("remote_load", url=self._url(), master="", world_size=1)
                else:
                    self._site.empty_watched(COPY if system == COPY else OURS)
                    answer = self._site.ask("load", **self._target(system))
                yield self._run(RECOVERY, system, turn, answer)

    def _saves_together(self, stage: int) -> Iterator[Run]:
        """Every rank saves a model of its own at the same time; the time of the last one."""
        everyone = range(len(self._site.nodes))
        taken = self._site.ask_all("take_up", [{"seeds": [i], "stage": stage} for i in everyone])
        self._state_bytes = taken[0]["state_bytes"]
        for turn in range(-WARM_UP, self._plan.rounds):
            self._site.ask_all("train", [{} for _ in everyone])
            self._step += 1
            for system in self._systems(turn):
                answers = self._save_everywhere(system)
                if turn >= 0:
                    slowest = max(answers, key=lambda answer: answer["seconds"])
                    yield self._run(TOGETHER, system, turn, slowest)

    def _save_everywhere(self, system: str) -> list[dict[str, Any]]:
        world = len(self._site.nodes)
        if system == REMOTE:
            target = self._remote_target() | {"master": self._site.master, "world_size": world}
            return self._site.ask_all("remote_save", [target] * world)
        cluster = self._site.clusters[system]
        common = {"job": "together", "step": self._step, "world_size": world, "precision": "exact"}
        return self._site.ask_all(
            "save", [common | {"address": cluster.address(node)} for node in self._site.nodes]
        )

    def _target(self, system: str) -> dict[str, Any]:
        cluster = self._site.clusters[COPY if system == COPY else OURS]
        lossy = system == INDEX8
        return {
            "address": cluster.address(self._site.watched),
            "job": "lossy" if lossy else "exact",
            "world_size": 1,
            "precision": "momentum8" if lossy else "exact",
        }

    def _remote_target(self) -> dict[str, Any]:
        """A folder for a new checkpoint; the one before is deleted."""
        assert self._site.storage is not None
        if self._checkpoint:
            self._site.storage.remove(self._checkpoint)
        self._checkpoint = f"step-{self._step}"
        self._site.storage.prepare(self._checkpoint)
        return {"url": self._url(), "master": "", "world_size": 1}

    def _url(self) -> str:
        assert self._site.storage is not None
        return self._site.storage.url(self._checkpoint)

    def _run(self, what: str, system: str, turn: int, answer: dict[str, Any]) -> Run:
        run = Run(
            what=what,
            system=system,
            seconds=answer["seconds"],
            state_bytes=self._state_bytes,
            sent_bytes=answer["sent_bytes"],
            received_bytes=answer["received_bytes"],
            cores_busy=answer["cores_busy"],
            round=turn,
        )
        self._say(
            f"  {what}, {system}: {run.seconds:.2f} s; sent {run.sent_bytes / 1e6:.0f} MB, "
            f"received {run.received_bytes / 1e6:.0f} MB, {run.cores_busy:.1f} cores busy"
        )
        return run


def measure(plan: Plan, say: Say, server_python: Path = SERVER_PYTHON) -> dict[str, Any]:
    """Run the plan: every comparison, what the server does alone, and why something was not run.

    Raises:
        SystemExit: there is no root here, or no namespaces.
    """
    if reason := why_not():
        sys.exit(f"the paper's experiment cannot run here: {reason}")
    no_server = paper_storage.why_not(server_python)
    if no_server:
        say(f"torch.distributed.checkpoint to remote storage is not run: {no_server}")
    train_all(plan.states, plan.seeds, plan.stages, TRAININGS, say)
    found: list[Comparison] = []
    ceilings = []
    for nodes in plan.layouts:
        with Site(
            nodes, plan.states, plan.codec, plan.ram_budget, None if no_server else server_python
        ) as site:
            if site.storage is not None:
                # Before any link is shaped: what is measured is the server, not a link.
                ceilings.append(site.storage.ceiling(site.watched, CEILING_BYTES, plan.recoveries))
            found += Experiment(plan, site, say).comparisons()
    return {
        "comparisons": found,
        "server_bytes_per_s": ceilings,
        "not_run": {REMOTE: no_server} if no_server else {},
        "plan": {
            "models": plan.models,
            "stages": plan.stages,
            "codec": plan.codec,
            "link_scale": plan.link_scale,
        },
    }
