"""Saves that are sent while the trainer copies, through real daemons; trainers that stop in the middle of the copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cluster.harness import DEADLINE_S, counters, replicas_on_disk, until

from fastcheck import Checkpointer, SaveFailedError, copying
from fastcheck.local import LocalCluster

_MB = 1 << 20


def state_of(step: int, tensors: int = 6) -> dict[str, Any]:
    """24 MiB that follow from the step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {f"layer{i}": torch.randn(_MB, generator=generator) for i in range(tensors)},
        "step": step,
    }


def assert_is(found: dict[str, Any], step: int) -> None:
    wanted = state_of(step)
    assert found["step"] == step
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name


class Held:
    """Stops every copy of this process before its third run."""

    def __init__(self, patch: pytest.MonkeyPatch | None = None) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._runs = 0
        self._real = copying.move_bytes
        if patch is None:
            copying.move_bytes = self._move
        else:
            patch.setattr(copying, "move_bytes", self._move)

    def _move(self, into: int, source: int, size: int) -> None:
        self._runs += 1
        if self._runs > 3:
            self.reached.set()
            self._open.wait()
        self._real(into, source, size)

    def release(self) -> None:
        self._open.set()


def trainer(address: str) -> Checkpointer:
    return Checkpointer("ahead", rank=0, world_size=1, address=address, copy_threads=1)


def arrived(cluster: LocalCluster) -> int:
    return counters(cluster, "node-1")["bytes_received"]


def test_chunks_are_at_the_holder_before_the_copy_has_ended(make_cluster, monkeypatch):
    cluster = make_cluster(2, overlap_staging="always", transfer_timeout_s=60)
    with trainer(cluster.address("node-0")) as ckpt:
        ckpt.save(1, state_of(1)).result(timeout=DEADLINE_S)
        before = arrived(cluster)
        held = Held(monkeypatch)
        handles: list[Any] = []
        saving = threading.Thread(target=lambda: handles.append(ckpt.save(2, state_of(2))))
        saving.start()
        try:
            until(lambda: arrived(cluster) > before, "a chunk at the holder before the copy has ended")
            assert held.reached.is_set() and saving.is_alive()
            assert counters(cluster, "node-0")["saves_staged"] == 1
            assert not any(path.name.startswith("2-") for path in replicas_on_disk(cluster, "node-1"))
            assert ckpt.steps() == [1]
        finally:
            held.release()
            saving.join(DEADLINE_S)
        handles[0].result(timeout=DEADLINE_S)
        assert counters(cluster, "node-0")["saves_ahead_stopped"] == 0
        cluster.kill("node-0", wipe=True)
        cluster.start("node-0")
    with trainer(cluster.address("node-0")) as ckpt:
        found = state_of(9)
        assert ckpt.load(found) == 2
        assert_is(found, 2)


def test_a_copy_that_raises_midway_leaves_nothing_behind(make_cluster, monkeypatch):
    cluster = make_cluster(2, overlap_staging="always", transfer_timeout_s=60)
    with trainer(cluster.address("node-0")) as ckpt:
        ckpt.save(1, state_of(1)).result(timeout=DEADLINE_S)
        before, copies = arrived(cluster), replicas_on_disk(cluster, "node-1")
        real = copying.move_bytes
        runs: list[int] = []

        def move(into: int, source: int, size: int) -> None:
            runs.append(size)
            if len(runs) == 5:
                until(lambda: arrived(cluster) > before, "a chunk at the holder")
                raise MemoryError("the copy breaks off here")
            real(into, source, size)

        with monkeypatch.context() as patch:
            patch.setattr(copying, "move_bytes", move)
            handle = ckpt.save(2, state_of(2))
        assert isinstance(handle.exception(), SaveFailedError)
        until(lambda: counters(cluster, "node-0")["saves_ahead_stopped"] == 1, "the daemon to take it back")
        assert replicas_on_disk(cluster, "node-1") == copies
        assert ckpt.steps() == [1]
        found = state_of(9)
        assert ckpt.load(found) == 1
        assert_is(found, 1)
        ckpt.save(3, state_of(3)).result(timeout=DEADLINE_S)
        assert ckpt.load(found) == 3
        assert_is(found, 3)


def test_a_trainer_killed_in_the_middle_of_its_copy_leaves_the_step_before(make_cluster):
    cluster = make_cluster(2, overlap_staging="always", transfer_timeout_s=60)
    address = cluster.address("node-0")
    with trainer(address) as ckpt:
        ckpt.save(1, state_of(1)).result(timeout=DEADLINE_S)
    before = arrived(cluster)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.test_sent_while_copied", address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=Path(__file__).parents[2],
    )
    try:
        until(lambda: arrived(cluster) > before, "a chunk at the holder before the copy has ended")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    until(lambda: counters(cluster, "node-0")["saves_ahead_stopped"] == 1, "the daemon to notice the death")
    assert not any(path.name.startswith("2-") for path in replicas_on_disk(cluster, "node-1"))
    assert counters(cluster, "node-0")["peers_quarantined"] == 0
    with trainer(address) as ckpt:
        found = state_of(9)
        assert ckpt.steps() == [1]
        assert ckpt.load(found) == 1
        assert_is(found, 1)
        ckpt.save(3, state_of(3)).result(timeout=DEADLINE_S)
        assert ckpt.load(found) == 3
        assert_is(found, 3)


def test_lazy_saves_are_sent_while_training_goes_on_and_are_exact(make_cluster):
    cluster = make_cluster(2, overlap_staging="always")
    net = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    optimizer = torch.optim.AdamW(net.parameters())
    wanted: dict[str, torch.Tensor] = {}
    with trainer(cluster.address("node-0")) as ckpt:
        for step in range(1, 7):
            optimizer.zero_grad()
            net(torch.randn(8, 1024)).square().mean().backward()
            optimizer.step()
            wanted = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            handle = ckpt.save(step, {"net": net, "optimizer": optimizer}, lazy=True)
        optimizer.step()
        handle.result(timeout=DEADLINE_S)
        assert counters(cluster, "node-0")["saves_ahead"] == 6
        assert ckpt.load({"net": net, "optimizer": optimizer}) == 6
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


if __name__ == "__main__":  # a trainer that never ends its copy
    with trainer(sys.argv[1]) as made:
        Held()
        made.save(2, state_of(2))
