"""torch.distributed.checkpoint in one process: what it costs in bytes, what a lost daemon does to training, misuse.

Round trips across ranks and meshes are in test_dcp_ranks.py.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.cluster.harness import until
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from fastcheck import Checkpointer, DaemonUnavailableError, InvalidArgumentError, UnsafeError
from fastcheck.dcp import FastCheckReader, FastCheckWriter
from fastcheck.local import LocalCluster

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if (
        "fastcheck" not in fsspec.available_protocols()
    ):  # a source tree that is not installed has no entry points
        fsspec.register_implementation("fastcheck", "fastcheck.dcp.filesystem.FastCheckFileSystem")
    with LocalCluster(tmp_path_factory.mktemp("dcp") / "cluster") as made:
        made.up(3, ram_budget="512MiB", settings={"keep_steps": 2, "codec": "always"})
        yield made


@pytest.fixture
def address(cluster, monkeypatch):
    found = cluster.address("node-0")
    monkeypatch.setenv("FASTCHECK_ADDRESS", found)
    return found


def trained(width: int = 512):
    """Model and optimizer, and a function that makes a step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model(torch.randn(64, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def ratio(handle) -> float:
    found: float = handle.stats["ratio"]
    return found


@pytest.mark.parametrize("form", ["get_state_dict", "optimizer"])
def test_the_codec_knows_the_optimizer_behind_flat_names(address, form):
    model, optimizer, step = trained()
    writer = FastCheckWriter(f"ratio-{form}")
    with Checkpointer(f"ratio-{form}-native", rank=0, world_size=1) as native:
        for number in range(1, 6):
            step()
            if form == "optimizer":
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            else:
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=number, storage_writer=writer)
            theirs = native.save(number, {"model": model, "optimizer": optimizer}).result(timeout=60)
    writer.close()
    assert writer.handle is not None
    # The header and the bytes of objects are in it as well: more would be roles or hyper-parameters that got lost.
    assert ratio(writer.handle) > 0.9 * ratio(theirs) > 2


def test_a_daemon_that_dies_in_a_save_does_not_end_training(cluster, address):
    class Deadly(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            cluster.kill("node-0")
            return super().resolve_data(write_item)

    model, _, step = trained(64)
    writer = FastCheckWriter("dying", connect_timeout_s=10)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, checkpoint_id="step-2", storage_writer=writer, planner=Deadly())
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, DaemonUnavailableError)
    step()
    cluster.start("node-0")
    until(lambda: len(cluster.pids("node-0")) >= 2, "the node to be back")

    def saved() -> bool:
        try:
            dcp.save(state, checkpoint_id="step-3", storage_writer=writer)
        except CheckpointException:
            return False
        return True

    until(saved, "a save after the daemon is back")
    found = {"model": {name: torch.zeros_like(t) for name, t in model.state_dict().items()}}
    reader = FastCheckReader("dying")
    dcp.load(found, storage_reader=reader)
    assert reader.step == 3
    for name, tensor in state["model"].items():
        assert torch.equal(found["model"][name], tensor)
    writer.close()


def test_a_saver_that_steps_between_planning_and_writing(address):
    writer = FastCheckWriter("between")
    state = {"w": torch.ones(10)}

    class Interrupted(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            other = threading.Thread(target=lambda: dcp.save(state, checkpoint_id=7, storage_writer=writer))
            other.start()
            other.join()
            return super().finish_plan(new_plan)

    with pytest.raises(CheckpointException, match="another saver began step 7"):
        dcp.save(state, checkpoint_id=1, storage_writer=writer, planner=Interrupted())
    with Checkpointer("between", rank=0, world_size=1) as looker:
        assert looker.steps() == [7]
    writer.close()


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (lambda: torch.zeros(4).to_sparse(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["sparse", "quantized"],
)
def test_a_tensor_that_cannot_be_filled_is_named(address, target, word):
    job = f"target-{word}"
    dcp.save({"deep": {"w": torch.ones(4)}}, checkpoint_id=1, storage_writer=FastCheckWriter(job))
    with pytest.raises(CheckpointException, match=f"'deep.w' .*{word}"):
        dcp.load({"deep": {"w": target()}}, storage_reader=FastCheckReader(job))


def test_steps_of_a_checkpointer_are_said_to_be_such(address):
    with Checkpointer("native", rank=0, world_size=1) as native:
        native.save(1, {"w": torch.ones(3)}).result(timeout=60)
    with pytest.raises(
        CheckpointException, match="not saved by torch.distributed.checkpoint: load it with fastcheck"
    ):
        dcp.load({"w": torch.ones(3)}, checkpoint_id=1, storage_reader=FastCheckReader("native"))


def test_everything_can_be_loaded_without_knowing_what_is_there(address):
    state = {"a": {"b": torch.arange(6.0)}, "list": [torch.ones(2), {"c": 5}], "epoch": 3}
    dcp.save(state, checkpoint_id=1, storage_writer=FastCheckWriter("all"))
    found: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        found, storage_reader=FastCheckReader("all"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert torch.equal(found["a"]["b"], state["a"]["b"])
    assert torch.equal(found["list"][0], torch.ones(2))
    assert found["epoch"] == 3


def test_switched_off(address, monkeypatch):
    monkeypatch.setenv("FASTCHECK_DISABLE", "1")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=1, storage_writer=FastCheckWriter("off"))
    with pytest.raises(CheckpointException, match="FASTCHECK_DISABLE"):
        dcp.load({"w": torch.ones(3)}, checkpoint_id=1, storage_reader=FastCheckReader("off"))


def test_a_writer_and_a_reader_travel_to_other_processes(address):
    writer, reader = FastCheckWriter("travel"), FastCheckReader("travel")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=1, storage_writer=writer)
    dcp.load({"w": torch.ones(3)}, storage_reader=reader)
    again = pickle.loads(pickle.dumps(writer))
    assert again.handle is None
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=2, storage_writer=again)
    found = {"w": torch.ones(3)}
    dcp.load(found, checkpoint_id=2, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert not found["w"].any()
    writer.close()


def test_by_url_with_no_class(address):
    state = {"model": {"w": torch.randn(700, 900), "b": torch.randn(3)}, "epoch": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id="fastcheck://url/step-100")
    found = {"model": {"w": torch.zeros(700, 900), "b": torch.zeros(3)}, "epoch": 0}
    dcp.load(found, checkpoint_id="fastcheck://url/step-100")
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert torch.equal(found["model"]["b"], state["model"]["b"])
    assert found["epoch"] == 5
    fs = fsspec.filesystem("fastcheck")
    assert "url" in fs.ls("fastcheck://", detail=False)
    assert fs.ls("fastcheck://url", detail=False) == ["url/step-100"]
    assert fs.ls("fastcheck://url/step-100", detail=False) == [
        "url/step-100/.metadata",
        "url/step-100/__0_0.distcp",
    ]
    assert fs.isdir("fastcheck://url/step-100")
    assert fs.isfile("fastcheck://url/step-100/.metadata")
    assert fs.exists("fastcheck://url/step-100")
    for absent in (
        "fastcheck://url/step-101",
        "fastcheck://nobody",
        "fastcheck://url/step-100/x",
        "fastcheck://nobody/step-1",
    ):
        assert not fs.exists(absent)
        with pytest.raises(FileNotFoundError):
            fs.ls(absent)
    with fs.open("fastcheck://url/step-100/__0_0.distcp", "rb") as file:
        whole = file.read()
        assert len(whole) == fs.size("fastcheck://url/step-100/__0_0.distcp") > state["model"]["w"].nbytes
        file.seek(-10, 2)
        assert file.read() == whole[-10:]
    for part in ("fastcheck://url/step-100/.metadata", "fastcheck://url/step-100/__0_0.distcp"):
        with pytest.raises(InvalidArgumentError, match="goes as a whole"):
            fs.rm_file(part)
    with pytest.raises(CheckpointException, match="step 100"):
        dcp.save(state, checkpoint_id="fastcheck://url/step-100")
    with pytest.raises(CheckpointException, match="'step-100', '100', 100 or 'fastcheck://JOB/step-100'"):
        dcp.save(state, checkpoint_id="fastcheck://url/stp-101")
    with pytest.raises(CheckpointException, match="names no step"):
        dcp.save(state, checkpoint_id="fastcheck://url")
    with pytest.raises(CheckpointException, match="committed steps of job 'url'"):
        dcp.load(found, checkpoint_id="fastcheck://url/step-99")


def test_a_save_by_url_that_fails_leaves_nothing_behind(address):
    class Broken(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise RuntimeError("no such thing")

    with pytest.raises(CheckpointException, match="no such thing"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id="fastcheck://broken/step-1", planner=Broken())
    fs = fsspec.filesystem("fastcheck")
    assert not fs.exists("fastcheck://broken/step-1")
    # Rank 0's file alone is no step either.
    with fs.open("fastcheck://broken/step-2/__0_0.distcp", "wb") as file:
        file.write(b"bytes")
    assert not fs.exists("fastcheck://broken/step-2")
    dcp.save({"w": torch.ones(3)}, checkpoint_id="fastcheck://broken/step-3")
    assert fs.ls("broken", detail=False) == ["broken/step-3"]


def test_steps_are_removed_by_url_and_the_newest_of_a_running_job_only_when_told(address):
    fs = fsspec.filesystem("fastcheck")
    for step in (1, 2):
        dcp.save({"w": torch.full((9,), step)}, checkpoint_id=f"fastcheck://gone/step-{step}")
    fs.rm("fastcheck://gone/step-1", recursive=True)
    assert fs.ls("gone", detail=False) == ["gone/step-2"]
    with pytest.raises(FileNotFoundError):
        fs.rm("fastcheck://gone/step-1")
    with pytest.raises(UnsafeError, match="seems to be running"):
        fs.rm_file("fastcheck://gone/step-2")  # this process may save again
    with pytest.raises(InvalidArgumentError, match="recursive=True"):
        fs.rm("fastcheck://gone")
    assert fs.exists("fastcheck://gone/step-2")
    fs.rm("fastcheck://gone", recursive=True)
    assert not fs.exists("fastcheck://gone") and "gone" not in fs.ls("fastcheck://", detail=False)
    # The job begins anew, with any number.
    dcp.save({"w": torch.full((9,), 7)}, checkpoint_id="fastcheck://gone/step-1")
    found = {"w": torch.zeros(9, dtype=torch.int64)}
    dcp.load(found, checkpoint_id="fastcheck://gone/step-1")
    assert found["w"].tolist() == [7] * 9
    fs.rm("fastcheck://gone/step-1", even_if_running=True)
    assert not fs.exists("fastcheck://gone/step-1")


def test_a_reader_tells_the_newest_step_or_that_there_is_none(address, monkeypatch):
    reader = FastCheckReader("newest")
    assert reader.newest() is None
    for step in (3, 5):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=step, storage_writer=FastCheckWriter("newest"))
        assert reader.newest() == step, "it asks anew each time"
    assert FastCheckReader(checkpoint_id="fastcheck://newest/step-3").newest() == 5
    monkeypatch.setenv("FASTCHECK_DISABLE", "1")
    assert reader.newest() is None
    monkeypatch.delenv("FASTCHECK_DISABLE")
    with pytest.raises(DaemonUnavailableError):  # not None: a run would begin anew in silence
        FastCheckReader("newest", address="unix:///nowhere/fastcheckd.sock").newest()
