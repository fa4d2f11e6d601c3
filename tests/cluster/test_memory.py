"""Little memory: steps go on being saved within it, exact, and where they cannot the refusal says what would do."""

import time

import pytest
import torch
from tests.cluster.harness import DEADLINE_S, counters, until

from fastcheck import Checkpointer, OutOfMemoryError

NODES = 3
#: Small, so slots count: a few chunks of 4 MiB on each node, a third of a state here.
PARAMETERS = 4_000_000
STATE_BYTES = 12 * PARAMETERS


class Trainer:
    """A rank that takes steps of AdamW, all of them from its number."""

    def __init__(self, cluster, rank: int, ranks: int = NODES) -> None:
        self.random = torch.Generator().manual_seed(rank)
        self.weights = torch.nn.Parameter(torch.randn(PARAMETERS, generator=self.random) * 0.02)
        self.optimizer = torch.optim.AdamW([self.weights], lr=1e-3)
        self.ckpt = Checkpointer(
            "small", rank=rank, world_size=ranks, address=cluster.address(f"node-{rank}")
        )

    @property
    def state(self):
        return {"weights": self.weights, "optimizer": self.optimizer}

    def train(self):
        self.weights.grad = torch.randn(PARAMETERS, generator=self.random) * 1e-3
        self.optimizer.step()
        return self.copy()

    def copy(self):
        moments = self.optimizer.state[self.weights]
        return [t.detach().clone() for t in (self.weights, moments["exp_avg"], moments["exp_avg_sq"])]


@pytest.fixture
def training(make_cluster):
    trainers = []

    def start(states_of_room: float, **settings):
        cluster = make_cluster(NODES, ram_budget=str(round(states_of_room * STATE_BYTES)), **settings)
        trainers.extend(Trainer(cluster, rank) for rank in range(NODES))
        return cluster, trainers

    yield start
    for trainer in trainers:
        trainer.ckpt.close()


def commit(trainers, step: int):
    """All save and the step is committed; what each then had."""
    saved = [trainer.train() for trainer in trainers]
    for handle in [trainer.ckpt.save(step, trainer.state) for trainer in trainers]:
        assert handle.result(timeout=DEADLINE_S).stats["memory"] == "lean"
    return saved


def assert_loads(trainers, step: int, saved) -> None:
    for trainer, wanted in zip(trainers, saved, strict=True):
        assert trainer.ckpt.load(trainer.state, step=step) == step
        for found, tensor in zip(trainer.copy(), wanted, strict=True):
            assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    ("keep_steps", "states_of_room"), [(2, 4.9), pytest.param(1, 3.8, marks=pytest.mark.long)]
)
def test_step_after_step_fits_into_little_more_than_what_one_takes(training, keep_steps, states_of_room):
    cluster, trainers = training(states_of_room, keep_steps=keep_steps)
    saved = {step: commit(trainers, step) for step in range(1, 7)}
    for node in cluster.node_ids:
        assert counters(cluster, node)["own_steps_dropped"] == 0
        assert counters(cluster, node)["deltas_made"] > 0
    for step in sorted(saved)[-keep_steps:]:
        assert_loads(trainers, step, saved[step])
    cluster.kill("node-1", wipe=True)
    cluster.start("node-1")
    until(lambda: trainers[1].ckpt.steps() == sorted(saved)[-keep_steps:], "the node to answer again")
    assert_loads(trainers, 6, saved[6])


def test_where_it_cannot_be_the_refusal_says_how_much_would_do(make_cluster):
    """At the first save, or before it by `prepare`: not once training has gone on for long."""
    cluster = make_cluster(NODES, ram_budget=str(round(1.5 * STATE_BYTES)))
    trainer = Trainer(cluster, 0, ranks=1)
    with trainer.ckpt:
        trainer.train()
        until(lambda: trainer.ckpt.steps() == [], "the daemon to answer")
        began = time.monotonic()
        with pytest.raises(OutOfMemoryError, match="ram_budget_bytes should be at least"):
            trainer.ckpt.prepare(trainer.state)
        assert time.monotonic() - began < 2
        with pytest.raises(
            OutOfMemoryError, match="needs 2 segments of.*ram_budget_bytes should be at least"
        ):
            trainer.ckpt.save(1, trainer.state).result(timeout=DEADLINE_S)
