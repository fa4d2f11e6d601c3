"""Lossy codings are asked for by name, told to the daemon, and never loaded by who asks for exactness."""

from __future__ import annotations

import pytest
import torch
from fake_daemon import FakeDaemon

from fastcheck import Checkpointer, InvalidArgumentError, LoadFailedError, LossyCheckpointError
from fastcheck.config import parse_precision
from fastcheck_proto.v1 import layout_pb2 as pb


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as running:
        yield running


def make_state(value: float) -> dict:
    return {"w": torch.full((100,), value), "n": int(value)}


@pytest.mark.parametrize(
    ("name", "coding", "bound"),
    [("momentum8", pb.MOMENTUM_CODING_INDEX8, 0), ("compact", pb.MOMENTUM_CODING_INDEX4, 1e-3)],
)
def test_what_each_name_lets_be_lost(name, coding, bound):
    made = parse_precision(name)
    assert (made.momentum, made.weights_bound) == (coding, bound)


def test_exact_is_the_default_and_says_nothing():
    assert parse_precision("exact") is None


@pytest.mark.parametrize("name", ["", "Exact", "momentum4", "index8", None, 8, []])
def test_other_names_are_refused(name):
    with pytest.raises(InvalidArgumentError, match="'exact', 'momentum8', 'compact'"):
        Checkpointer(job="gpt", precision=name)


@pytest.mark.parametrize("way", ["address", "tcp_address"], ids=["shared memory", "streams"])
def test_a_lossy_step_is_loaded_only_by_who_allows_it(daemon, way):
    address = getattr(daemon, way)
    with Checkpointer(job="gpt", address=address, precision="compact") as lossy:
        lossy.save(1, make_state(1)).result(timeout=60)
        precision = daemon.memory.by_step(1).sealed.layout.precision
        assert (precision.momentum, precision.weights_bound) == (pb.MOMENTUM_CODING_INDEX4, 1e-3)
        state = make_state(0)
        assert lossy.load(state) == 1
        assert state["n"] == 1
        state = make_state(0)
        with pytest.raises(LossyCheckpointError, match="allow_lossy=True"):
            lossy.load(state, allow_lossy=False)
        assert (state["n"], state["w"].any()) == (0, False)
    with Checkpointer(job="gpt", address=address) as exact:
        state = make_state(0)
        with pytest.raises(LoadFailedError, match="step 1 was saved with a lossy coding"):
            exact.load(state)
        assert (state["n"], state["w"].any()) == (0, False)
        assert exact.load(state, allow_lossy=True) == 1
        exact.save(2, make_state(2)).result(timeout=60)
        assert not daemon.memory.by_step(2).sealed.layout.HasField("precision")
        assert exact.load(state) == 2


@pytest.mark.parametrize("way", ["address", "tcp_address"], ids=["shared memory", "streams"])
def test_the_layout_travels_with_the_seal_and_close_takes_the_hooks_off(daemon, way):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    state = {"m": net, "o": optimizer}
    with Checkpointer(job="gpt", address=getattr(daemon, way)) as ckpt:
        assert ckpt.load(state) is None
        assert optimizer._optimizer_step_post_hooks
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0
        ckpt.save(1, state).result(timeout=60)
        saved = daemon.memory.by_step(1).sealed
        assert sum(chunk.bytes for chunk in saved.layout.chunks) == saved.state_bytes
        assert {run.role for run in saved.layout.chunks[0].runs} >= {pb.ROLE_PARAM, pb.ROLE_EXP_AVG}
        (step,) = saved.layout.optimizer_steps
        assert (step.lr, step.observed, step.step) == (0.5, True, 1)
        assert ckpt.load({"m": net, "o": optimizer}) == 1
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
