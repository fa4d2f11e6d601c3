"""Staging from a GPU: on streams of its own, into page-locked memory, the host waiting for nothing it need not.

`SlowGpu` is a device whose streams are threads: what it is given happens in order, later. For it a float64 tensor is
on the device. The last tests want a real one.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from fake_daemon import FakeDaemon

from fastcheck import Checkpointer
from fastcheck import shared_memory as staging_module
from fastcheck.gpu import Cuda, Mark, Pair, Pinner
from fastcheck.segments import MappedSegment, anonymous

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


class Stream:
    """Work in order, on a thread."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def launch(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self) -> threading.Event:
        event = threading.Event()
        self.launch(event.set)
        return event

    def end(self) -> None:
        self._work.put(None)
        self.thread.join(10)


class SlowGpu:
    """A device with a current stream, that of training, and a side stream."""

    def __init__(self) -> None:
        self.current, self.side = Stream(), Stream()
        self.locked: dict[int, int] = {}
        self.refusal = ""
        self.fail_after: int | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.float64

    def mark(self, tensors: Iterable[torch.Tensor]) -> Mark:
        return {device: self.current.mark() for device in {tensor.device for tensor in tensors}}

    def copy(self, pairs: Sequence[Pair], after: Mark) -> Mark:
        for event in after.values():
            self.side.launch(lambda event=event: event.wait(10))
        for count, (into, source) in enumerate(pairs):
            if count == self.fail_after:
                self.side.mark().wait(10)
                raise RuntimeError("out of memory on the device")
            self.side.launch(lambda into=into, source=source: into.copy_(source))
        return {device: self.side.mark() for device in after}

    def hold(self, until: Mark) -> None:
        for event in until.values():
            self.current.launch(lambda event=event: event.wait(10))

    def wait(self, until: Mark) -> None:
        for event in until.values():
            assert event.wait(10)

    def lock(self, address: int, size_bytes: int) -> str:
        if not self.refusal:
            self.locked[address] = size_bytes
        return self.refusal

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def kernel(self, tensor: torch.Tensor, value: float) -> None:
        """Launch a change, as a step does: torch counts it at once, the device makes it later."""
        torch.autograd.graph.increment_version(tensor)
        place = tensor.data  # has a count of its own
        self.current.launch(lambda: place.fill_(value))


@pytest.fixture
def gpu(monkeypatch):
    made = SlowGpu()
    monkeypatch.setattr(staging_module, "Cuda", lambda: made)
    yield made
    made.current.end()
    made.side.end()


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as running:
        yield running


@pytest.fixture
def ckpt(gpu, daemon):
    with Checkpointer(job="gpt", address=daemon.address) as made:
        yield made


class Optimizer(torch.optim.Optimizer):
    """A step that only launches its kernel."""

    def __init__(self, tensor: torch.Tensor, gpu: SlowGpu) -> None:
        super().__init__([tensor], {})
        self.gpu = gpu

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.gpu.kernel(parameter, 3.0)


def make(gpu: SlowGpu) -> dict:
    weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.float64))
    near = torch.nn.Parameter(torch.ones(1000))
    return {"w": weight, "near": near, "o": Optimizer(weight, gpu), "p": torch.optim.SGD([near], lr=0.1)}


def test_a_lazy_copy_waits_for_work_before_it_and_the_next_step_waits_on_the_device_for_the_copy(
    daemon, ckpt, gpu
):
    state = make(gpu)
    busy = threading.Event()
    gpu.current.launch(lambda: busy.wait(10))
    gpu.kernel(state["w"], 2.0)  # launched before the save, made after it has returned
    handle = ckpt.save(1, state, lazy=True)
    state["o"].step()  # the device is still busy: had the host waited, this would hang
    assert not handle.staged
    busy.set()
    assert handle.result(timeout=60).committed
    gpu.current.mark().wait(10)
    assert state["w"].eq(3).all()
    ckpt.load({**state, "o": Optimizer(state["w"], gpu)})
    assert state["w"].eq(2).all()


def test_a_plain_save_returns_when_the_device_has_copied(daemon, ckpt, gpu):
    state = {"w": torch.ones(1000, dtype=torch.float64), "v": torch.ones(10)}
    gpu.kernel(state["w"], 2.0)
    handle = ckpt.save(1, state)
    assert handle.staged
    gpu.kernel(state["w"], 3.0)
    gpu.current.mark().wait(10)
    handle.result(timeout=60)
    ckpt.load(state)
    assert state["w"].eq(2).all()


@pytest.mark.parametrize("lazy", [True, False])
def test_a_device_that_fails_costs_the_save_and_holds_nothing_up(daemon, ckpt, gpu, lazy):
    state = make(gpu)
    gpu.fail_after = 0
    handle = ckpt.save(1, state, lazy=lazy)
    state["o"].step()
    assert "out of memory on the device" in str(handle.exception(timeout=60))
    assert not daemon.memory.all_sealed()
    gpu.fail_after = None
    assert ckpt.save(2, state, lazy=lazy).result(timeout=60).committed


def test_segments_are_page_locked_once_and_let_go_with_their_mapping(daemon, ckpt, gpu):
    daemon.memory.segment_reuse = True
    state = make(gpu)
    for step in (1, 2, 3):
        ckpt.save(step, state, lazy=True).result(timeout=60)
        assert len(gpu.locked) == 1
    ckpt.close()
    gc.collect()
    assert gpu.locked == {}


def test_a_state_without_tensors_on_a_gpu_locks_nothing(daemon, ckpt, gpu):
    ckpt.save(1, {"v": torch.ones(10)}).result(timeout=60)
    assert gpu.locked == {}


def test_a_machine_that_refuses_page_locks_is_told_of_once_and_saves_go_on(daemon, ckpt, gpu, caplog):
    gpu.refusal = "cudaHostRegister answered 2"
    state = make(gpu)
    with caplog.at_level(logging.WARNING, "fastcheck"):
        for step in range(1, 7):
            ckpt.save(step, state).result(timeout=60)
    assert [r.message for r in caplog.records if "page-lock" in r.message and "answered 2" in r.message]
    assert len([r for r in caplog.records if "page-lock" in r.message]) == 1
    assert ckpt._transport._pinner.refusals == 3


def test_spares_are_locked_ahead_only_once_a_gpu_is_in_use(gpu):
    pinner = Pinner(gpu)
    segment = anonymous(8192)
    pinner.pin_ahead(segment)
    assert gpu.locked == {}
    other = anonymous(8192)
    assert pinner.pin(other)
    pinner.pin_ahead(segment)
    assert len(gpu.locked) == 2
    del segment, other
    gc.collect()
    assert gpu.locked == {}


def test_a_driver_that_throws_is_a_refusal(gpu, monkeypatch):
    def broken(address: int, size_bytes: int) -> str:
        raise RuntimeError("no driver")

    monkeypatch.setattr(gpu, "lock", broken)
    pinner = Pinner(gpu)
    assert not pinner.pin(anonymous(4096))
    assert pinner.refusals == 1


@needs_cuda
def test_a_real_device_copies_lazily_and_exactly(daemon):
    net = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with Checkpointer(job="gpt", address=daemon.address) as ckpt:
        for step in range(1, 20):
            net(torch.ones(8, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            wanted = net.weight.detach().clone()
            ckpt.save(step, {"net": net, "optimizer": optimizer}, lazy=True)
        optimizer.step()
        other = torch.nn.Linear(1024, 1024)
        ckpt.load({"net": other, "optimizer": torch.optim.AdamW(other.parameters())})
        assert torch.equal(other.weight, wanted.cpu())


@needs_cuda
def test_a_real_driver_locks_and_unlocks_a_segment():
    segment: MappedSegment = anonymous(1 << 20)
    gpu = Cuda()
    assert gpu.lock(segment.tensor.data_ptr(), 1 << 20) == ""
    assert segment.tensor.is_pinned()
    gpu.unlock(segment.tensor.data_ptr())
