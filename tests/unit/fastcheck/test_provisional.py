"""What a trainer sees of steps that nobody can commit, and how it gets at them."""

import logging

import pytest
import torch
from fake_daemon import FakeDaemon

from fastcheck import Checkpointer, InvalidArgumentError, RegistryUnavailableError
from fastcheck_proto.v1 import trainer_pb2 as pb


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as fake:
        yield fake


def state(value=1.0):
    return {"w": torch.full((7,), value)}


def trainer(daemon, *, far=False, **identity):
    address = daemon.tcp_address if far else daemon.address
    return Checkpointer("gpt", address=address, **{"rank": 0, "world_size": 1, **identity})


def test_a_provisional_step_is_replicated_and_not_done(daemon):
    daemon.auto_commit = False
    with trainer(daemon) as ckpt:
        handle = ckpt.save(1, state())
        daemon.memory.tell(1, state=pb.SAVE_STATE_PROVISIONAL, copies=1)
        for _ in range(500):
            if handle.provisional:
                break
            handle._wait(0.01)
        assert handle.provisional and handle.replicated and not handle.committed and not handle.done
        assert "provisional" in repr(handle) and handle.stats["provisional"]
        with pytest.raises(TimeoutError, match="provisional"):
            handle.result(timeout=0.05)
        daemon.memory.commit(1)
        assert handle.result(timeout=60).committed
        assert not handle.provisional and handle.stats["provisional"]


@pytest.mark.parametrize("far", [False, True])
def test_a_load_without_a_registry_has_to_be_asked_for(daemon, far, caplog):
    with trainer(daemon) as ckpt:
        ckpt.save(3, state(3.0)).result(timeout=60)
    daemon.without_quorum = True
    with trainer(daemon, far=far) as ckpt, caplog.at_level(logging.WARNING, logger="fastcheck"):
        mine = state(0.0)
        with pytest.raises(RegistryUnavailableError, match=r"allow_provisional=True"):
            ckpt.load(mine)
        assert not mine["w"].any()
        assert ckpt.load(mine, allow_provisional=True) == 3
        assert torch.equal(mine["w"], state(3.0)["w"])
        assert ckpt.loaded_provisional and "without the registry" in caplog.text
        daemon.without_quorum = False
        assert ckpt.load(mine, allow_provisional=True) == 3
        assert not ckpt.loaded_provisional


def test_one_of_several_ranks_needs_the_step_named(daemon):
    with trainer(daemon, world_size=2) as ckpt:
        ckpt.save(3, state(3.0)).result(timeout=60)
    daemon.without_quorum = True
    with trainer(daemon, world_size=2) as ckpt:
        with pytest.raises(InvalidArgumentError, match=r"step=.*3"):
            ckpt.load(state(0.0), allow_provisional=True)
        assert ckpt.load(state(0.0), step=3, allow_provisional=True) == 3
        daemon.without_quorum = False
        assert ckpt.load(state(0.0), allow_provisional=True) == 3
