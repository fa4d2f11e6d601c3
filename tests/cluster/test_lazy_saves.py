"""Lazy saves of a real training loop through real daemons: what is loaded is what training had, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from tests.cluster.harness import DEADLINE_S, until

from fastcheck import Checkpointer, FastCheckError
from fastcheck.local import LocalCluster


class Run:
    """A small model in training, with two optimizers, a schedule, and buffers that the forward pass changes."""

    def __init__(self, seed: int, width: int = 256) -> None:
        torch.manual_seed(seed)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.GELU()
        )
        self.head = torch.nn.Linear(width, width)
        self.one = torch.optim.AdamW(self.body.parameters(), lr=0.01)
        self.two = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.one, 3)
        self.step = 0
        self.width = width

    @property
    def state(self) -> dict[str, Any]:
        return {
            "body": self.body,
            "head": self.head,
            "one": self.one,
            "two": self.two,
            "schedule": self.schedule,
            "step": self.step,
            "noise": torch.get_rng_state(),
        }

    def train(self) -> None:
        for _ in range(2):  # gradients of two batches
            self.head(self.body(torch.randn(32, self.width))).square().mean().backward()
        self.one.step()
        self.two.step()
        self.schedule.step()
        self.one.zero_grad()
        self.two.zero_grad()
        self.step += 1

    def bits(self) -> dict[str, torch.Tensor]:
        found = {
            f"{part}.{k}": v for part in ("body", "head") for k, v in getattr(self, part).state_dict().items()
        }
        for name in ("one", "two"):
            for key, values in getattr(self, name).state_dict()["state"].items():
                found |= {f"{name}.{key}.{k}": v for k, v in values.items() if isinstance(v, torch.Tensor)}
        return {name: tensor.clone() for name, tensor in found.items()}


def trainer(cluster: LocalCluster) -> Checkpointer:
    return Checkpointer("lazy", rank=0, world_size=1, address=cluster.address("node-0"))


def assert_resumes(cluster: LocalCluster, step: int, wanted: dict[str, torch.Tensor]) -> Run:
    run = Run(seed=99)
    with trainer(cluster) as ckpt:
        state = run.state
        assert ckpt.load(state) == step
        assert state["step"] == step
    found = run.bits()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    return run


def test_a_loop_that_saves_lazily_resumes_bit_for_bit(make_cluster):
    cluster = make_cluster(2)
    run = Run(seed=1)
    run.train()
    lazy_bytes = 0
    for _ in range(4):
        with trainer(cluster) as ckpt:
            ckpt.load(run.state)
            for _ in range(5):
                run.train()
                wanted = run.bits()
                handle = ckpt.save(run.step, run.state, lazy=True)
                lazy_bytes += handle.wait_staged(DEADLINE_S).stats["lazy_bytes"] if run.step % 2 else 0
            run.train()  # beyond what was saved, while it may still be copied
            run.train()
            handle.result(timeout=DEADLINE_S)
        run = assert_resumes(cluster, handle.step, wanted)
        run.step = handle.step
    assert lazy_bytes > 0


def test_a_lazy_save_survives_the_loss_of_its_node(make_cluster):
    cluster = make_cluster(3)
    run = Run(seed=1)
    run.train()
    with trainer(cluster) as ckpt:
        wanted = run.bits()
        handle = ckpt.save(run.step, run.state, lazy=True)
        run.train()
        handle.result(timeout=DEADLINE_S)
    cluster.kill("node-0", wipe=True)
    cluster.start("node-0")
    assert_resumes(cluster, 1, wanted)


def test_a_daemon_that_is_killed_during_lazy_saves_leaves_training_alone(make_cluster):
    cluster = make_cluster(2)
    run = Run(seed=1)
    saved: dict[int, dict[str, torch.Tensor]] = {}
    with trainer(cluster) as ckpt:
        handles = []
        for step in range(1, 13):
            run.train()
            saved[step] = run.bits()
            handles.append(ckpt.save(step, run.state, lazy=True))
            if step == 3:
                handles[-1].result(timeout=DEADLINE_S)
            if step == 6:
                cluster.kill("node-0")
            if step == 9:
                cluster.start("node-0")
        until(lambda: all(handle.done for handle in handles), "all handles to end")
        assert any(isinstance(handle.exception(), FastCheckError) for handle in handles[5:9])
    newest = max(step for step, handle in enumerate(handles, start=1) if handle.committed)
    with trainer(cluster) as ckpt:
        steps = ckpt.steps()
        assert newest in steps
    assert_resumes(cluster, steps[-1], saved[steps[-1]])
