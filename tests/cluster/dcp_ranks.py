"""One rank of a gloo process group that goes through all of DCP's cases with real daemons; see test_dcp_ranks.py.

`python -m tests.cluster.dcp_ranks RANK WORLD_SIZE PORT ADDRESS OUT`: writes {case: "" or its traceback} as JSON to OUT.
A case runs on all ranks, in one order; starting processes and torch once costs less than doing so per case.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import faulthandler
import functools
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict_saver  # its AsyncCheckpointerType came after 2.6
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from fastcheck.dcp import FastCheckReader, FastCheckWriter

CASES: dict[str, Callable[[], None]] = {}
WORLD = 4


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def job() -> str:
    """A job of the running case's own."""
    # Not `inspect.stack`: it looks for the source of every frame, among all of torch's modules.
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name not in CASES:
        frame = frame.f_back
    assert frame is not None
    return "dcp-" + frame.f_code.co_name.replace("_", "-")


def save(state: dict[str, Any], step: int = 1, name: str | None = None, **options: Any) -> None:
    dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=FastCheckWriter(name or job()), **options)


def load(state: dict[str, Any], step: int = 1, name: str | None = None, **options: Any) -> None:
    dcp.load(state, checkpoint_id=f"step-{step}", storage_reader=FastCheckReader(name or job()), **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def refused(action: Callable[[], object], *words: str) -> None:
    """The action fails with DCP's own exception on every rank, and it says these words."""
    try:
        action()
    except CheckpointException as error:
        text = str(error)
        assert all(word in text for word in words), text
    else:
        raise AssertionError("it did not fail")


#: Even, uneven (ten rows on four ranks), some ranks empty, no dimension to cut, and larger than a chunk of 4 MiB.
SHAPES = {"even": (16, 8), "uneven": (10, 7), "few": (3, 5), "vector": (13,), "large": (2050, 1030)}


@functools.cache  # nobody changes them, and the cases ask for them a hundred times
def global_tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made["half"] = torch.randn(9, 6, generator=generator).bfloat16()
    made["counts"] = torch.randint(0, 99, (6, 4), generator=generator)
    return made


def distributed(mesh: DeviceMesh, *placements: Any, seed: int | None = 1) -> dict[str, Any]:
    """The global tensors on a mesh, or zeros in their places; made without any communication."""
    made = {}
    for name, tensor in global_tensors(seed or 1).items():
        fitting = [p if not isinstance(p, Shard) or p.dim < tensor.dim() else Replicate() for p in placements]
        local = box_of(tensor, mesh, fitting).clone()
        made[name] = DTensor.from_local(
            local if seed is not None else torch.zeros_like(local),
            mesh,
            fitting,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return made


def box_of(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> torch.Tensor:
    """What a rank has of a whole tensor."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tensor[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))]


def same(found: dict[str, Any], seed: int = 1) -> None:
    for name, tensor in global_tensors(seed).items():
        part = found[name]
        if isinstance(part, DTensor):
            wanted = box_of(tensor, part.device_mesh, part.placements)
            assert torch.equal(part.to_local(), wanted), name
        else:
            assert torch.equal(part, tensor), name


@functools.cache  # a mesh has process groups of its own
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))


@functools.cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@case
def one_dimension_to_others() -> None:
    save({"model": distributed(line(), Shard(0))})
    for mesh, placements in (
        (line(), (Shard(0),)),
        (line(), (Shard(1),)),
        (line(), (Replicate(),)),
        (square(), (Shard(0), Shard(1))),
        (square(), (Shard(1), Shard(0))),
        (square(), (Replicate(), Shard(1))),
        (square(), (Shard(0), Replicate())),
    ):
        state = {"model": distributed(mesh, *placements, seed=None)}
        load(state)
        same(state["model"])


class Net(nn.Module):
    """Tied weights, a buffer, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.seen: dict[str, Any] = {"batches": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["batches"] += 1
        return self.head(self.norm(self.down(self.up(self.embed(x)).relu())))

    def get_extra_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.seen)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class App:
    """A Stateful with model and optimizer, as the documentation of DCP has it."""

    def __init__(self, mesh: DeviceMesh, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, steps: int) -> None:
        for number in range(steps):
            generator = torch.Generator().manual_seed(number)
            self.model(torch.randint(0, 11, (8,), generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def gathered(self) -> dict[str, Any]:
        """All tensors, whole."""
        state = self.state_dict()
        found = {f"model.{k}": whole(v) for k, v in state["model"].items() if isinstance(v, torch.Tensor)}
        for fqn, moments in state["optimizer"]["state"].items():
            found |= {f"optimizer.{fqn}.{k}": whole(v) for k, v in moments.items()}
        return found


def same_app(one: App, other: App) -> None:
    mine, theirs = one.gathered(), other.gathered()
    assert mine.keys() == theirs.keys()
    assert len(mine) > 20
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    assert one.model.seen == other.model.seen
    assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


@case
def one_writer_for_many_steps() -> None:
    app = App(line())
    writer = FastCheckWriter(job())
    reader = FastCheckReader(job())
    for step in range(1, 5):
        app.train(1)
        dcp.save({"app": app}, checkpoint_id=step, storage_writer=writer)
        assert writer.checkpoint_id == f"fastcheck://{job()}/step-{step}"
    assert writer.handle is not None
    assert writer.handle.stats["bytes"] > 0
    other = App(line(), seed=5)
    dcp.load({"app": other}, storage_reader=reader)  # the newest
    assert reader.step == 4
    same_app(app, other)
    dist.barrier()
    refused(lambda: dcp.save({"app": app}, checkpoint_id=3, storage_writer=writer), "step 4")
    app.train(1)
    dcp.save({"app": app}, checkpoint_id=5, storage_writer=writer)
    writer.close()


@case
def objects_and_values() -> None:
    generator = torch.Generator().manual_seed(7)
    values = {
        "epoch": 7,
        "name": "gpt",
        "blob": b"\0\xff" * 5000,
        "nothing": None,
        "history": [1, 2.5, "x"],
        "nested": {"a": {"b": [torch.ones(3), {"c": 1}]}},
        "rng": generator.get_state(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bools": torch.tensor([True, False]),
        "complex": torch.randn(3, generator=generator, dtype=torch.complex64),
        "view": torch.arange(40.0).view(5, 8)[:, ::2],
        "fp8": torch.randn(8, generator=generator).to(torch.float8_e4m3fn),
    }
    save(values)
    found = copy.deepcopy(values)
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            found[key] = torch.zeros(value.shape, dtype=value.dtype)
    found |= {"epoch": -1, "name": "", "blob": b"", "history": [], "nothing": 1}
    found["nested"]["a"]["b"] = [torch.zeros(3), {"c": 0}]
    load(found)
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert torch.equal(
                found[key].float() if key == "fp8" else found[key], value.float() if key == "fp8" else value
            )
        elif key == "nested":
            assert torch.equal(found[key]["a"]["b"][0], torch.ones(3))
            assert found[key]["a"]["b"][1] == {"c": 1}
        else:
            assert found[key] == value, key
    # DCP converts dtypes, also where bytes come as they are.
    narrow = {"scalar": torch.tensor(0, dtype=torch.bfloat16)}
    load(narrow)
    assert narrow["scalar"] == 3.5


@case
def strict_partial_and_mismatched() -> None:
    save({"model": distributed(line(), Shard(0)), "epoch": 3})
    some = {"model": {"uneven": distributed(line(), Shard(1), seed=None)["uneven"]}}
    load(some)
    same({**distributed(line(), Shard(0)), **some["model"]})
    more = {"model": distributed(line(), Shard(0), seed=None) | {"new": torch.zeros(2)}}
    refused(lambda: load(more), "Missing key", "model.new")
    load(more, planner=DefaultLoadPlanner(allow_partial_load=True))
    same(more["model"])
    assert not more["model"]["new"].any()
    refused(lambda: load({"model": {"even": torch.zeros(16, 9)}}), "Size mismatch", "model.even")
    refused(lambda: load({"model": {"even": 3}}), "model.even")


@case
def tensors_that_cannot_be_saved() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    for name, tensor, word in (
        ("sparse", torch.eye(4).to_sparse(), "layout"),
        ("quantized", quantized, "quantized"),
        ("meta", torch.empty(4, device="meta"), "meta device"),
    ):
        state = {"good": torch.ones(4), "deep": {name: tensor}}
        refused(lambda state=state: save(state), f"'deep.{name}'", word)
    refused(lambda: load({"good": torch.ones(4)}), "No step of job")
    save({"good": torch.ones(4)}, step=2)


@case
def meta_tensors_are_made_when_loaded() -> None:
    save({"model": distributed(line(), Shard(0))})
    with torch.device("meta"):
        state = {"model": {"even": torch.empty(16, 8)}}
    load(state)
    assert torch.equal(state["model"]["even"], global_tensors()["even"])


@case
def steps_and_jobs_that_are_not_there() -> None:
    state = {"model": distributed(line(), Shard(0))}
    save(state)
    refused(lambda: load(state, step=7), "step 7", f"Committed steps of job '{job()}': 1")
    refused(lambda: load(state, name="dcp-gtp"), "No step of job 'dcp-gtp'")
    reader = FastCheckReader("dcp-gtp")
    for load_it in (
        lambda: dcp.load(state, storage_reader=reader, checkpoint_id=f"fastcheck://{job()}/step-1"),
    ):
        try:
            load_it()
        except ValueError as error:
            assert "'dcp-gtp'" in str(error)
        else:
            raise AssertionError("two jobs were accepted")


@case
def asynchronously_in_a_thread() -> None:
    app = App(line())
    writer = FastCheckWriter(job())
    own = dist.new_group()  # training goes on with its collectives meanwhile
    wanted: dict[str, torch.Tensor] = {}
    for step in (1, 2):
        app.train(1)
        wanted = {name: tensor.clone() for name, tensor in app.gathered().items()}
        future = dcp.async_save(
            {"app": app}, checkpoint_id=f"step-{step}", storage_writer=writer, process_group=own
        )
        app.train(1)
        future.result(timeout=60)
    other = App(line(), seed=5)
    load({"app": other}, step=2)
    for name, tensor in other.gathered().items():
        assert torch.equal(tensor, wanted[name]), name


@case
def asynchronously_with_a_stager() -> None:
    staging = __import__("torch.distributed.checkpoint.staging", fromlist=["DefaultStager"])
    if not hasattr(staging, "DefaultStager"):
        return  # torch 2.6
    stager = staging.DefaultStager(staging.StagingOptions(False, False, True, False))
    state = {"model": distributed(line(), Shard(0)), "epoch": 4}
    response = dcp.async_save(
        state, checkpoint_id="step-1", storage_writer=FastCheckWriter(job()), async_stager=stager
    )
    response.staging_completion.result(timeout=60)
    response.upload_completion.result(timeout=60)
    stager.close()
    found = {"model": distributed(square(), Shard(0), Shard(1), seed=None), "epoch": 0}
    load(found)
    same(found["model"])
    assert found["epoch"] == 4


@case
def asynchronously_in_a_process() -> None:
    writer = FastCheckWriter(job())
    for step in (1, 2):
        state = {"model": distributed(line(), Shard(0), seed=step)}
        future = dcp.async_save(
            state,
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS,
        )
        result = getattr(future, "upload_completion", future)
        result.result(timeout=120)
    found = {"model": distributed(square(), Shard(0), Shard(1), seed=None)}
    load(found, step=2)
    same(found["model"], seed=2)


@case
def each_rank_by_itself() -> None:
    """no_dist: every rank is a job of its own."""
    name = f"{job()}-{dist.get_rank()}"
    save({"mine": torch.full((3,), float(dist.get_rank()))}, name=name, no_dist=True)
    found = {"mine": torch.zeros(3)}
    load(found, name=name, no_dist=True)
    assert torch.equal(found["mine"], torch.full((3,), float(dist.get_rank())))


def data_parallel(width: int = 24) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def same_tree(found: Any, wanted: Any, path: str = "") -> None:
    """Bit for bit, with the same keys."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), path
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), path
        for key, value in wanted.items():
            same_tree(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for number, value in enumerate(wanted):
            same_tree(found[number], value, f"{path}[{number}]")
    else:
        assert found == wanted, path


def emptied(tree: Any) -> Any:
    """The same tree with zeros for tensors."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: emptied(value) for key, value in tree.items()}
    return [emptied(value) for value in tree] if isinstance(tree, list) else copy.deepcopy(tree)


@case
def cached_plans_of_a_data_parallel_state_that_grows() -> None:
    """AdamW's state appears with its first step, a key of one's own with another, and goes again."""
    if "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters:
        return
    model, optimizer = data_parallel()
    one = FastCheckWriter(job())
    for step in range(1, 9):
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            **({"average": torch.full((5, step), float(step))} if step in (4, 5) else {}),
            **({"seen": torch.arange(step)} if step >= 6 else {}),
        }
        dcp.save(
            state,
            checkpoint_id=step,
            storage_writer=one if step % 3 else FastCheckWriter(job()),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        found = emptied(state)
        load(found, step=step)
        same_tree(found, state)
        if step not in (1, 4, 7):  # else the next save finds the plans as they were
            model(torch.full((2, 24), 1.0 + step + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


@case
def cached_plans_of_two_jobs_in_turn() -> None:
    """torch keeps its plans by the planner's class, whoever saves: another job's, and those of a planner without."""
    if "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters:
        return
    model, optimizer = data_parallel()
    for step in range(1, 5):
        model(torch.full((2, 24), float(step))).square().mean().backward()
        optimizer.step()
        first = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        second = {"model": first["model"], "more": torch.ones(7, 2 + step // 3)}
        for name, state, caching in (("a", first, True), ("b", second, True), ("c", second, False)):
            planner = DefaultSavePlanner(enable_plan_caching=caching)
            save(state, step=step, name=f"{job()}-{name}", planner=planner)
            found = emptied(state)
            load(found, step=step, name=f"{job()}-{name}")
            same_tree(found, state)


@case
def a_plan_that_lacks_something_is_no_step() -> None:
    """A save planner whose plans do not have what its metadata names, on one rank, or that finishes with less."""

    class Forgetful(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return [dataclasses.replace(plans[0], items=plans[0].items[1:]), *plans[1:]], metadata

    class Careless(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            plan = super().finish_plan(new_plan)
            return dataclasses.replace(plan, items=plan.items[:-1]) if dist.get_rank() == 2 else plan

    state = {"model": distributed(line(), Shard(0)), "epoch": 3}
    save(state)
    refused(lambda: save(state, step=2, planner=Forgetful()), "lacks", "model.even")
    refused(lambda: save(state, step=3, planner=Careless()), "finish_plan", "rank 2")
    refused(lambda: load(state, step=2), "Committed steps", ": 1")
    refused(lambda: load(state, step=3), "Committed steps", ": 1")
    save(state, step=4)


@case
def data_parallel_families_stay_on_one_rank() -> None:
    def trained(seed: int) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(width, width) for width in (40, 30, 20, 40, 10, 30)))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer, dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    optimizer, state = trained(1)
    homes = []
    for step in (1, 2):
        save(state, step=step)
        reader = FastCheckReader(job(), step)
        reader.read_metadata()
        assert reader._opened is not None
        homes.append({fqn: item.rank for (fqn, _), item in reader._opened.index.stored.items()})
        for name in state["model"]:
            slots = (f"optimizer.state.{name}.{slot}" for slot in ("exp_avg", "exp_avg_sq", "step"))
            assert len({homes[-1][fqn] for fqn in (f"model.{name}", *slots)}) == 1, (name, homes[-1])
        assert set(homes[-1].values()) == set(range(WORLD)), "all ranks take their part"
        optimizer.step()
    assert homes[0] == homes[1], "each rank finds what it saved before as its base"
    (_, wanted), (_, found) = trained(1), trained(2)
    load(found, step=1)
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
        for slot, moment in wanted["optimizer"]["state"][name].items():
            assert torch.equal(found["optimizer"]["state"][name][slot], moment), (name, slot)


@case
def shared_tensors_are_stored_once() -> None:
    one = torch.randn(512, 512, generator=torch.Generator().manual_seed(3))
    writer = FastCheckWriter(job())
    dcp.save(
        {"a": one, "b": one},
        checkpoint_id=1,
        storage_writer=writer,
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )
    assert writer.handle is not None
    if dist.get_rank() == 0:
        assert one.nbytes < writer.handle.stats["bytes"] < 1.5 * one.nbytes
    found = {"a": torch.zeros_like(one), "b": torch.zeros_like(one)}
    load(found)
    assert torch.equal(found["a"], one)
    assert torch.equal(found["b"], one)


@case
def by_url_without_collectives() -> None:
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        return
    url, rank = f"fastcheck://{job()}", dist.get_rank()
    fs = fsspec.filesystem("fastcheck")
    for step in (1, 2):
        state = {
            "mine": torch.full((5, 3), float(10 * step + rank)),
            "same": torch.arange(4.0),
            "epoch": step,
        }
        dcp.save(state, checkpoint_id=f"{url}/step-{step}", use_collectives=False)
        names = [name.rpartition("/")[2] for name in fs.ls(f"{url}/step-{step}", detail=False)]
        assert names == sorted(f"__{r}{kind}" for r in range(WORLD) for kind in (".metadata", "_0.distcp"))
    for step in (1, 2):
        found = {"mine": torch.zeros(5, 3), "same": torch.zeros(4), "epoch": 0}
        dcp.load(found, checkpoint_id=f"{url}/step-{step}")
        assert torch.equal(found["mine"], torch.full((5, 3), float(10 * step + rank)))
        assert torch.equal(found["same"], torch.arange(4.0))
        assert found["epoch"] == step
    dist.barrier()
    # With a coordinator again, in the same job.
    dcp.save({"model": distributed(line(), Shard(0))}, checkpoint_id=f"{url}/step-3")
    found = {"model": distributed(square(), Shard(0), Shard(1), seed=None)}
    dcp.load(found, checkpoint_id=f"{url}/step-3")
    same(found["model"])


def main(rank: str, world_size: str, port: str, address: str, out: str, *only: str) -> None:
    os.environ |= {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "FASTCHECK_ADDRESS": address,
    }
    torch.set_num_threads(1)
    if (
        "fastcheck" not in fsspec.available_protocols()
    ):  # a source tree that is not installed has no entry points
        fsspec.register_implementation("fastcheck", "fastcheck.dcp.filesystem.FastCheckFileSystem")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    faulthandler.dump_traceback_later(60, repeat=True)  # where it hangs, if it does
    found = {}
    for name, function in CASES.items():
        if only and name not in only:
            continue
        began = time.monotonic()
        try:
            function()
            found[name] = ""
        except BaseException:  # noqa: BLE001  DCP's own exception is no Exception
            found[name] = traceback.format_exc()
        Path(out).write_text(json.dumps(found))  # the others may wait for this rank in vain
        dist.barrier()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201  the log of a failed test
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
