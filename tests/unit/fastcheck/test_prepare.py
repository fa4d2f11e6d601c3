"""Memory that is made ready before the first save, and cold memory that a copy meets all the same."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest
import torch
from fake_daemon import FakeDaemon
from tests.eventually import until

from fastcheck import Checkpointer, OutOfMemoryError, UnsupportedStateError
from fastcheck import copier as copier_module
from fastcheck import prefault as prefault_module
from fastcheck import segments as segments_module
from fastcheck.copier import Copier
from fastcheck.segments import anonymous
from fastcheck.state.flatten import flatten
from fastcheck_proto.v1 import common_pb2


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as running:
        running.memory.segment_reuse = True
        yield running


@pytest.fixture
def ckpt(daemon):
    with Checkpointer(job="gpt", address=daemon.address) as made:
        yield made


def make(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: object) -> dict:
    net = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700))
    return {"net": net, "inner": [{"optimizer": kind(net.parameters(), **settings)}], "step": 0}


def train(state: dict) -> None:
    state["net"](torch.ones(2, 700)).sum().backward()
    state["inner"][0]["optimizer"].step()


def test_the_first_save_finds_the_segment_that_prepare_had_touched(daemon, ckpt):
    state = make()
    ckpt.prepare(state)
    (segment,) = ckpt._transport._cache._segments.values()
    assert segment.warm, "prepare returns when it is"
    train(state)
    handle = ckpt.save(1, state).result(timeout=60)
    assert handle.committed and handle.stats["waited_s"] == 0
    assert list(ckpt._transport._cache._segments.values()) == [segment]
    assert len(daemon.memory.reserved) == 1


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_what_the_optimizer_will_keep_is_foreseen(daemon, ckpt, kind, settings):
    state = make(kind, **settings)
    ckpt.prepare(state)
    train(state)
    needed = flatten(state).state_bytes
    assert needed <= daemon.memory.reserved[0].state_bytes <= needed + needed // 4
    handle = ckpt.save(1, state).result(timeout=60)
    assert handle.stats["waited_s"] == 0
    ckpt.prepare(state)
    assert daemon.memory.reserved[1].state_bytes == needed


def test_a_daemon_that_is_away_or_refuses_is_no_error_of_prepare(tmp_path, caplog):
    with (
        Checkpointer(job="gpt", address=f"unix://{tmp_path}/none.sock") as ckpt,
        caplog.at_level(logging.INFO),
    ):
        ckpt.prepare(make())
        assert "not be prepared" in caplog.text
        with pytest.raises(UnsupportedStateError):
            ckpt.prepare({"f": print})


def test_what_does_not_fit_is_said_at_once_and_raises(daemon, ckpt):
    daemon.refuse["reserve"] = (common_pb2.ERROR_CODE_OVER_BUDGET, "needs 5 of 3 bytes")
    with pytest.raises(OutOfMemoryError, match="needs 5 of 3 bytes"):
        ckpt.prepare(make())
    daemon.refuse["reserve"] = (common_pb2.ERROR_CODE_NO_QUORUM, "nobody is there")
    ckpt.prepare(make())


def test_elsewhere_prepare_only_reserves(daemon):
    with Checkpointer(job="gpt", address=daemon.tcp_address) as ckpt:
        ckpt.prepare(make())
        assert len(daemon.memory.reserved) == 1 and not daemon.memory.all_sealed()


def test_closing_does_not_wait_for_pages(daemon, ckpt, monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def slow(address: int, size_bytes: int) -> bool:
        entered.set()
        return leave.wait(0.5)

    monkeypatch.setattr(prefault_module, "populate", slow)
    monkeypatch.setattr(prefault_module, "_SLICE_BYTES", 4096)
    preparing = threading.Thread(target=ckpt.prepare, args=(make(),))
    preparing.start()
    assert entered.wait(10)
    started = time.monotonic()
    ckpt.close()
    assert time.monotonic() - started < 10, "a slice, and not all pages or the time that they may take"
    preparing.join(10)
    assert not preparing.is_alive()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("fastcheck")])


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_cold_memory_is_made_present_block_by_block_just_ahead_of_the_copy(monkeypatch, kernel):
    state = {str(i): torch.full((size,), float(i)) for i, size in enumerate((3, 5000, 100_000, 70, 9000, 1))}
    flat = flatten(state)
    segment = anonymous(flat.state_bytes)
    base, end = segment.tensor.data_ptr(), segment.tensor.data_ptr() + segment.tensor.numel()
    present: list[tuple[int, int]] = []

    def populate(address: int, size_bytes: int) -> bool:
        assert base <= address < address + size_bytes <= end
        present.append((address, address + size_bytes))
        return kernel == "new" and segments_module.populate(address, size_bytes)

    def move(into: int, source: int, size_bytes: int) -> None:
        assert any(low <= into < high for low, high in present)
        assert any(low < into + size_bytes <= high for low, high in present)
        copier_module.ctypes.memmove(into, source, size_bytes)

    monkeypatch.setattr(copier_module, "populate", populate)
    monkeypatch.setattr(copier_module, "move_bytes", move)
    for size in ("_PIECE_BYTES", "_POPULATE_BYTES"):
        monkeypatch.setattr(copier_module, size, 64 << 10)
    Copier(1).copy(flat, segment.tensor, warm=False)
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(present))
    warm = anonymous(flat.state_bytes)
    before = len(present)
    monkeypatch.setattr(copier_module, "move_bytes", copier_module.ctypes.memmove)
    Copier(1).copy(flat, warm.tensor)
    assert len(present) == before
    assert torch.equal(segment.tensor, warm.tensor)


def test_a_range_that_is_no_memory_is_not_present():
    assert not segments_module.populate(4096, 4096)
    segment = anonymous(100_000)
    assert segments_module.populate(segment.tensor.data_ptr() + 5, 50_000)
    assert not segment.tensor.any()
