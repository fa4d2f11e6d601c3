"""What FastCheckIO and its callback refuse, by name: URLs that are none, ranks that do not fit, ways to shard."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_daemon import FakeDaemon
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy

from fastcheck import Checkpointer, InvalidArgumentError, LoadFailedError, StepNotFoundError
from fastcheck.integrations import lightning
from fastcheck.integrations.lightning import FastCheckIO, MemoryCheckpoint


@pytest.fixture
def io(tmp_path):
    with (
        FakeDaemon(tmp_path) as daemon,
        Checkpointer("gpt", rank=0, world_size=1, address=daemon.address) as ckpt,
    ):
        yield FastCheckIO(ckpt)


class Elsewhere:
    """Lightning's own plugin, which must not get what was meant for memory."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} went to disk")


@pytest.mark.parametrize(
    "url",
    [
        "fastcheck://gtp/step-3",
        "fastcheck://gpt/stp-3",
        "fastcheck://gpt/step-",
        "fastcheck://gpt/step--3",
        "fastcheck://gpt/step-3/x",
        "fastcheck://",
        "fastcheck:gpt/step-3",
        Path("fastcheck://gtp/step-3"),
    ],
)
@pytest.mark.parametrize("action", ["save", "load"])
def test_a_url_that_is_none_is_shown_with_the_right_form(io, url, action):
    io._other = Elsewhere()
    with pytest.raises(InvalidArgumentError) as caught:
        if action == "save":
            io.save_checkpoint({"a": 1}, url)
        else:
            io.load_checkpoint(url)
    assert str(url) in str(caught.value)
    assert "fastcheck://gpt/step-N, or fastcheck://gpt for the newest" in str(caught.value)


def test_a_save_needs_a_step_and_a_load_a_committed_one(io):
    with pytest.raises(
        InvalidArgumentError, match="fastcheck://gpt names no step: save to fastcheck://gpt/step-N"
    ):
        io.save_checkpoint({"a": 1}, "fastcheck://gpt")
    with pytest.raises(InvalidArgumentError, match="job gpt has no committed step"):
        io.load_checkpoint("fastcheck://gpt")
    with pytest.raises(StepNotFoundError, match="step 7"):
        io.load_checkpoint("fastcheck://gpt/step-7")


@pytest.mark.parametrize(
    "url", ["fastcheck://gpt/step-3", Path("fastcheck://gpt/step-3"), "fastcheck://gpt/step-3/"]
)
def test_a_good_url_however_it_comes(io, url):
    io._other = Elsewhere()
    io.save_checkpoint({"a": 1}, url)
    deadline = time.monotonic() + 30
    while 3 not in io.checkpointer.steps():  # `save_checkpoint` has returned before the commit
        assert time.monotonic() < deadline, io.checkpointer.steps()
    assert io.load_checkpoint(url) == {"a": 1}


def test_what_cannot_be_saved_is_named_by_its_key(io):
    with pytest.raises(TypeError, match=r"\['hyper_parameters'\]\['fn'\]"):
        io.save_checkpoint({"hyper_parameters": {"fn": print}}, "fastcheck://gpt/step-3")


def trainer(io, strategy=SingleDeviceStrategy, rank=0, world_size=1, plugin=None):
    made = strategy.__new__(strategy)
    made._checkpoint_io = plugin or io
    return SimpleNamespace(strategy=made, global_rank=rank, world_size=world_size, optimizers=[])


def set_up(io, **options):
    MemoryCheckpoint(io).setup(trainer(io, **options), None, "fit")


def test_one_process_and_ddp_are_set_up(io):
    set_up(io)
    set_up(io, strategy=DDPStrategy)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_save_past_the_plugin_are_refused(io, strategy):
    with pytest.raises(
        InvalidArgumentError, match=f"{strategy.__name__} saves and loads in a way of its own"
    ):
        set_up(io, strategy=strategy)


def test_ranks_that_do_not_fit_are_refused(io):
    with pytest.raises(
        InvalidArgumentError, match="rank 1 of 2 for Lightning, and rank 0 of 1 for its Checkpointer"
    ):
        set_up(io, strategy=DDPStrategy, rank=1, world_size=2)


def test_another_plugin_is_refused(io):
    with pytest.raises(InvalidArgumentError, match=r"Trainer\(plugins=\[io\]\)"):
        set_up(io, plugin=FastCheckIO(io.checkpointer))


def test_ranks_that_found_different_checkpoints_do_not_begin(io, monkeypatch):
    monkeypatch.setattr(lightning, "from_all", lambda mine, world_size: [mine, [7]])
    with pytest.raises(LoadFailedError, match=r"rank 0: did not call newest\(\), rank 1: step 7 on disk"):
        set_up(io)
    assert io.newest() is None
    with pytest.raises(LoadFailedError, match="rank 0: nothing, rank 1: step 7 on disk"):
        set_up(io)


def test_another_ranks_random_states_are_left_alone_and_told_of(io, caplog):
    callback = MemoryCheckpoint(io)
    state = callback.state_dict()
    assert state["rank"] == 0
    callback.load_state_dict({**state, "rank": 3})
    assert callback._loaded is None
    assert "of rank 3" in caplog.text
    callback.load_state_dict(state)
    assert callback._loaded is state


def test_optimizers_that_shard_their_state_are_refused(io):
    sharding = SimpleNamespace(consolidate_state_dict=print)
    several = SimpleNamespace(world_size=2, optimizers=[sharding], global_step=0)
    with pytest.raises(InvalidArgumentError, match="ZeroRedundancyOptimizer"):
        MemoryCheckpoint(io).on_train_start(several, None)
