"""Saves that are copied while training goes on: exact with the fence, refused without it, never torn.

`Gate` stops the copy in the middle, so that what happens "meanwhile" does happen meanwhile.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import subprocess
import sys
import threading

import pytest
import torch
from fake_daemon import FakeDaemon
from tests.eventually import until
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fastcheck import Checkpointer, DaemonUnavailableError, SaveTimeoutError, StateChangedError
from fastcheck import copier as copier_module
from fastcheck import lazy as lazy_module
from fastcheck_proto.v1 import common_pb2


class Gate:
    """Lets a copy's first runs through, then holds up the thread that is not the trainer's until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, through: int = 1) -> None:
        self._trainer = threading.get_ident()
        self._left = through
        self._open = threading.Event()
        self.reached = threading.Event()
        monkeypatch.setattr(copier_module, "move_bytes", self._move)

    def _move(self, into: int, source: int, size: int) -> None:
        if threading.get_ident() != self._trainer:
            if not self._left:
                self.reached.set()
                assert self._open.wait(20)
            self._left = max(0, self._left - 1)
        ctypes.memmove(into, source, size)

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        assert self.reached.wait(10)


class Watching(Gate):
    """Opens itself as soon as the trainer waits for the copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        hold = lazy_module.LazyCopy.hold

        def opened(copy: lazy_module.LazyCopy) -> None:
            self.open()
            hold(copy)

        monkeypatch.setattr(lazy_module.LazyCopy, "hold", opened)


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as running:
        yield running


@pytest.fixture
def ckpt(daemon):
    with Checkpointer(job="gpt", address=daemon.address) as made:
        yield made


def make(seed: int = 0, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> dict:
    """A model of several layers, with buffers, after one step."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.BatchNorm1d(128),
        torch.nn.Linear(128, 128),
        torch.nn.Linear(128, 8),
    )
    state = {"net": net, "optimizer": optimizer(net.parameters(), lr=0.1), "step": seed}
    train(state)
    return state


def backward(state: dict) -> None:
    state["net"](torch.randn(16, 64)).square().mean().backward()


def train(state: dict) -> None:
    state["optimizer"].zero_grad()
    backward(state)
    state["optimizer"].step()


def bits(state: dict) -> dict[str, torch.Tensor]:
    """A deep copy of all tensors."""
    found = {f"net.{name}": t for name, t in state["net"].state_dict().items()}
    for key, values in state["optimizer"].state_dict()["state"].items():
        found |= {f"{key}.{name}": t for name, t in values.items() if isinstance(t, torch.Tensor)}
    return {name: t.detach().clone() for name, t in found.items()}


def loaded(ckpt: Checkpointer, step: int, like: dict) -> dict[str, torch.Tensor]:
    other = make(99, type(like["optimizer"]))
    until(lambda: step in ckpt.steps())
    assert ckpt.load(other, step=step) == step
    return bits(other)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_step_waits_for_the_copy_and_the_saved_state_is_the_one_before_it(
    daemon, ckpt, monkeypatch, optimizer
):
    state = make(1, optimizer)
    wanted = bits(state)
    gate = Watching(monkeypatch)
    handle = ckpt.save(5, state, lazy=True)
    gate.wait()
    assert not handle.staged
    train(state)
    assert handle.result(timeout=60).committed
    assert handle.stats["lazy_bytes"] > 0
    assert handle.stats["stage_s"] > 0
    assert not same(bits(state), wanted)
    assert same(loaded(ckpt, 5, state), wanted)


def test_many_lazy_saves_of_a_training_loop_are_exact(daemon, ckpt):
    state = make(1)
    wanted = {}
    for step in range(1, 30):
        train(state)
        wanted[step] = bits(state)
        ckpt.save(step, state, lazy=True)
    ckpt.fence()
    for step, expected in wanted.items():
        assert same(loaded(ckpt, step, state), expected), step


def test_without_the_fence_the_change_is_found_and_nothing_is_sealed(daemon, ckpt, monkeypatch):
    state = make(1)
    gate = Gate(monkeypatch)
    handle = ckpt.save(5, state, lazy=True)
    gate.wait()
    with torch.no_grad():
        state["net"][3].weight.add_(1)  # nobody asked
    gate.open()
    with pytest.raises(StateChangedError, match=r"net\.3\.weight.*fence\(\)") as caught:
        handle.result(timeout=60)
    assert caught.value.names == ("net.3.weight",)
    assert not handle.staged
    assert daemon.memory.by_step(5) is None
    # From now on that tensor is copied before save returns.
    wanted = bits(state)
    handle = ckpt.save(6, state, lazy=True)
    with torch.no_grad():
        state["net"][3].weight.add_(1)
    handle.result(timeout=60)
    assert same(loaded(ckpt, 6, state), wanted)


def test_only_what_a_step_changes_is_left_for_later(daemon, ckpt, monkeypatch):
    state = make(1)
    frozen = torch.nn.Linear(64, 64)
    average = copy.deepcopy(state["net"])
    rate = torch.tensor(0.1)
    whole = {**state, "frozen": frozen, "average": average, "rate": rate}
    wanted = {k: v.clone() for k, v in average.state_dict().items()}
    buffers = {k: v.clone() for k, v in state["net"].named_buffers()}
    gate = Gate(monkeypatch)
    handle = ckpt.save(5, whole, lazy=True)
    gate.wait()
    # The forward pass changes the running statistics, the loop everything that no optimizer has.
    state["net"](torch.randn(16, 64))
    with torch.no_grad():
        frozen.weight.zero_()
        for tensor in average.state_dict().values():
            tensor.zero_()
    rate.zero_()
    whole["step"] = 77
    gate.open()
    handle.result(timeout=60)
    other = {
        **make(99),
        "frozen": torch.nn.Linear(64, 64),
        "average": copy.deepcopy(average),
        "rate": rate + 1,
    }
    ckpt.load(other)
    assert other["step"] == 1
    assert other["rate"] == 0.1
    assert other["frozen"].weight.any()
    assert all(torch.equal(v, wanted[k]) for k, v in other["average"].state_dict().items())
    assert all(torch.equal(v, buffers[k]) for k, v in other["net"].named_buffers())


def test_tensors_that_get_other_memory_meanwhile_are_saved_as_they_were(daemon, ckpt, monkeypatch):
    state = make()
    ckpt.save(1, state).wait_staged(timeout=20)  # the next one goes along its trace
    wanted = bits(state)
    gate = Gate(monkeypatch, through=0)
    handle = ckpt.save(2, state, lazy=True)
    gate.wait()
    moments = [t for values in state["optimizer"].state.values() for t in values.values()]
    for tensor in [*state["net"].parameters(), *moments]:
        old = tensor.data_ptr()
        tensor.data = torch.full_like(tensor, 7.0)
        assert tensor.data_ptr() != old
    filler = [torch.full((128, 128), 9.0) for _ in range(64)]  # where freed memory would be taken again
    gate.open()
    handle.wait_staged(timeout=20)
    assert handle.stats["lazy_bytes"] > 0
    assert same(loaded(ckpt, 2, make(seed=2)), wanted)
    del filler


def test_gradient_accumulation_waits_only_at_the_step(daemon, ckpt, monkeypatch):
    state = make(1)
    wanted = bits(state)
    gate = Watching(monkeypatch)
    handle = ckpt.save(5, state, lazy=True)
    gate.wait()
    state["optimizer"].zero_grad()
    parameters = dict(state["net"].named_parameters())
    for _ in range(4):
        backward(state)
    assert not handle.staged
    assert handle.stats["blocked_s"] > 0
    state["optimizer"].step()
    handle.result(timeout=60)
    found = loaded(ckpt, 5, state)
    assert all(torch.equal(found[f"net.{name}"], wanted[f"net.{name}"]) for name in parameters)


def test_the_first_step_of_several_optimizers_waits_also_of_one_that_is_not_in_the_state(
    daemon, ckpt, monkeypatch
):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    one = torch.optim.AdamW(net[0].parameters())
    two = torch.optim.SGD(net[1].parameters(), lr=0.1, momentum=0.9)
    outside = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, first in enumerate((one, two, outside), start=1):
        net(torch.ones(2, 8)).sum().backward()
        wanted = {k: v.clone() for k, v in net.state_dict().items()}
        with monkeypatch.context() as patch:
            gate = Watching(patch)
            handle = ckpt.save(step, {"net": net, "one": one, "two": two}, lazy=True)
            gate.wait()
            for optimizer in (first, one, two, outside):
                optimizer.step()
            handle.result(timeout=60)
        again = {"net": copy.deepcopy(net), "one": torch.optim.AdamW(net[0].parameters()), "two": two}
        del again["one"], again["two"]
        saved = {"net": copy.deepcopy(net), "one": copy.deepcopy(one), "two": copy.deepcopy(two)}
        ckpt.load(saved, step=step)
        assert all(torch.equal(v, wanted[k]) for k, v in saved["net"].state_dict().items())


def test_without_an_optimizer_object_everything_is_copied_at_once(daemon, ckpt):
    state = make(1)
    plain = {"net": state["net"].state_dict(), "optimizer": state["optimizer"].state_dict()}
    handle = ckpt.save(1, plain, lazy=True)
    assert handle.staged
    assert handle.stats["lazy_bytes"] == 0


def test_steps_that_may_be_captured_or_run_no_hooks_are_no_fence(daemon, ckpt):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return None

    net = torch.nn.Linear(4, 4)
    own = Own(net.parameters())
    Own.step = lambda self, closure=None: None  # as a library does that wraps another optimizer
    capturable = torch.optim.SGD(net.parameters())
    capturable.param_groups[0]["capturable"] = True
    for step, optimizer in enumerate((own, capturable), start=1):
        assert ckpt.save(step, {"net": net, "o": optimizer}, lazy=True).stats["lazy_bytes"] == 0
    own.optimizer = torch.optim.SGD(net.parameters())
    handle = ckpt.save(3, {"net": net, "o": own}, lazy=True)
    assert handle.wait_staged(10).stats["lazy_bytes"] > 0


def test_the_loop_may_fence_by_itself_or_wait_for_the_handle(daemon, ckpt, monkeypatch):
    state = make(1)
    for step in (1, 2):
        wanted = bits(state)
        with monkeypatch.context() as patch:
            gate = Watching(patch)
            handle = ckpt.save(step, state, lazy=True)
            gate.wait()
            if step == 1:
                ckpt.fence()
            else:
                with pytest.raises(SaveTimeoutError, match="must not change"):
                    handle.wait_staged(0.01)
                gate.open()
                assert handle.wait_staged(10) is handle
                assert handle.staged
            with torch.no_grad():
                for parameter in state["net"].parameters():
                    parameter.zero_()
            handle.result(timeout=60)
        assert same(loaded(ckpt, step, state), wanted)


def test_the_next_save_a_load_and_close_come_after_the_copy(daemon, monkeypatch):
    state = make(1)
    for step, action in enumerate(("save", "load", "close"), start=1):
        ckpt = Checkpointer(job=f"gpt{step}", address=daemon.address)
        ckpt.save(1, make(7)).result(timeout=60)
        train(state)
        wanted = bits(state)
        with monkeypatch.context() as patch:
            gate = Watching(patch)
            handle = ckpt.save(10 * step, state, lazy=True)
            gate.wait()
            if action == "save":
                ckpt.save(10 * step + 1, make(3))
            elif action == "load":
                assert ckpt.load(state, step=1) == 1
            else:
                ckpt.close()
        assert handle.staged, action
        with Checkpointer(job=f"gpt{step}", address=daemon.address) as again:
            assert same(loaded(again, 10 * step, state), wanted), action
        ckpt.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("fastcheck")]


def test_a_training_loop_that_raises_leaves_a_whole_save_behind(daemon):
    state = make(1)
    wanted = bits(state)
    with pytest.raises(ZeroDivisionError), Checkpointer(job="gpt", address=daemon.address) as ckpt:
        handle = ckpt.save(5, state, lazy=True)
        raise ZeroDivisionError
    assert handle.staged
    with Checkpointer(job="gpt", address=daemon.address) as again:
        assert same(loaded(again, 5, state), wanted)


def test_a_failure_of_the_copy_or_the_seal_is_in_the_handle_and_not_in_the_step(daemon, ckpt, monkeypatch):
    state = make(1)
    daemon.refuse["sealed"] = (common_pb2.ERROR_CODE_OVER_BUDGET, "full")
    handle = ckpt.save(1, state, lazy=True)
    train(state)
    assert "full" in str(handle.exception(timeout=60))
    daemon.refuse.clear()

    def broken(*move: int) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(copier_module, "move_bytes", broken)
        handle = ckpt.save(2, {**state, "net": torch.nn.Identity()}, lazy=True)
        train(state)
        assert "defect" in str(handle.exception(timeout=60))
    assert not daemon.memory.all_sealed()
    assert ckpt.save(3, state, lazy=True).result(timeout=60).committed


def test_a_fence_that_is_broken_off_by_the_user_fails_the_save_and_the_next_one_is_whole(
    daemon, ckpt, monkeypatch
):
    state = make(1)
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        handle = ckpt.save(1, state, lazy=True)
        gate.wait()

        def interrupted(*move: int) -> None:
            raise KeyboardInterrupt

        patch.setattr(copier_module, "move_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state["optimizer"].step()
        with torch.no_grad():
            state["net"][0].weight.zero_()
        gate.open()
        assert "broken off: KeyboardInterrupt" in str(handle.exception(timeout=60))
    assert daemon.memory.by_step(1) is None
    wanted = bits(state)
    ckpt.save(2, state, lazy=True).result(timeout=60)
    assert same(loaded(ckpt, 2, state), wanted)


def test_a_helping_thread_that_fails_fails_the_save(daemon, monkeypatch):
    state = {"w": torch.ones(50_000_000)}
    trainer = threading.get_ident()

    def broken(into: int, source: int, size: int) -> None:
        if threading.get_ident() != trainer:
            raise MemoryError("in a helper")
        helped.wait(10)
        ctypes.memmove(into, source, size)

    helped = threading.Event()
    spoil = copier_module.Moves.spoil

    def seen(moves: copier_module.Moves, error: BaseException) -> None:
        spoil(moves, error)
        helped.set()

    monkeypatch.setattr(copier_module, "move_bytes", broken)
    monkeypatch.setattr(copier_module.Moves, "spoil", seen)
    with Checkpointer(job="gpt", address=daemon.address, copy_threads=2) as ckpt:
        handle = ckpt.save(1, state)
        assert "in a helper" in str(handle.exception(timeout=60))
    assert not daemon.memory.all_sealed()


def test_a_daemon_that_dies_meanwhile_costs_the_save_and_nothing_else(tmp_path, monkeypatch):
    state = make(1)
    with FakeDaemon(tmp_path) as daemon, Checkpointer(job="gpt", address=daemon.address) as ckpt:
        gate = Watching(monkeypatch)
        handle = ckpt.save(1, state, lazy=True)
        gate.wait()
        daemon.stop()
        train(state)
        assert isinstance(handle.exception(timeout=60), DaemonUnavailableError)
        assert ckpt.save(2, state, lazy=True).exception(timeout=60)


def test_the_hook_is_gone_after_close_and_after_a_checkpointer_that_nobody_closed(daemon):
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    state = make(1)
    with Checkpointer(job="gpt", address=daemon.address) as ckpt:
        ckpt.save(1, state, lazy=True)
        assert len(hooks) == before + 1
    assert len(hooks) == before
    ckpt = Checkpointer(job="gpt2", address=daemon.address)
    ckpt.save(1, state, lazy=True).result(timeout=60)
    del ckpt
    gc.collect()
    assert len(hooks) == before
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("fastcheck-session")])


def test_a_program_that_ends_right_after_a_lazy_save_has_it_sealed(daemon):
    source = f"""
import torch, fastcheck
net = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
ckpt = fastcheck.Checkpointer(job="gpt", address={daemon.address!r})
ckpt.save(4, {{"net": net, "optimizer": optimizer}}, lazy=True)
"""
    found = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    assert daemon.memory.by_step(4) is not None


def test_through_another_host_a_lazy_save_is_a_plain_one(daemon):
    with Checkpointer(job="gpt", address=daemon.tcp_address) as ckpt:
        state = make(1)
        wanted = bits(state)
        handle = ckpt.save(1, state, lazy=True)
        assert handle.staged
        train(state)
        handle.result(timeout=60)
        assert same(loaded(ckpt, 1, state), wanted)
