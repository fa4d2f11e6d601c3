"""What one environment of the matrix must do: import everything, and one local cluster's save, commit and load.

`python -m tests.matrix.smoke` prints {"versions": {package: version}, "steps": {step: "" or its traceback}} as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("torch", "protobuf", "grpcio", "numpy")
#: They import frameworks that a thin environment does not have, or run a command.
LEFT_OUT = ("fastcheck.integrations.", "fastcheck.__main__", "fastcheckd.__main__")


def imports() -> None:
    """Every module of the three packages."""
    for package in ("fastcheck_proto", "fastcheck", "fastcheckd"):
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            if not module.name.startswith(LEFT_OUT):
                importlib.import_module(module.name)


def native() -> None:
    """A model and its optimizer: saved twice, committed, loaded into other ones."""
    import torch  # noqa: PLC0415  so that an import that fails is a step that failed

    from fastcheck import Checkpointer  # noqa: PLC0415

    def make(seed: int) -> dict[str, torch.nn.Module | torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, found = make(1), make(2)
    with Checkpointer("matrix", rank=0, world_size=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step, saved).result(timeout=60)
    with Checkpointer("matrix", rank=0, world_size=1) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.load(found) == 2
    mine, theirs = (
        [*state["model"].state_dict().values(), *(t for s in moments(state) for t in s.values())]
        for state in (saved, found)
    )
    assert len(mine) == len(theirs) == 4 + 4 * 3
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def moments(state: dict) -> list[dict]:
    """What an optimizer keeps of each parameter."""
    return list(state["optimizer"].state_dict()["state"].values())


def dcp_classes() -> None:
    """torch.distributed.checkpoint with the classes, in turn with threads; the newest is loaded."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    from fastcheck.dcp import FastCheckReader, FastCheckWriter  # noqa: PLC0415

    writer, state = FastCheckWriter("matrix-dcp"), dcp_state(1)
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    dcp.async_save(state, checkpoint_id="step-2", storage_writer=writer).result(60)
    reader, found = FastCheckReader("matrix-dcp"), dcp_state(2)
    dcp.load(found, storage_reader=reader)
    assert reader.step == 2
    same(found, state)
    writer.close()


def dcp_url() -> None:
    """The same by URL: fsspec finds FastCheck by its entry point."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    state, found = dcp_state(1), dcp_state(2)
    dcp.save(state, checkpoint_id="fastcheck://matrix-url/step-1")
    dcp.load(found, checkpoint_id="fastcheck://matrix-url/step-1")
    same(found, state)


def dcp_state(seed: int) -> dict:
    """Tensors of several kinds, and an object."""
    import torch  # noqa: PLC0415

    torch.manual_seed(seed)
    return {
        "model": {"w": torch.randn(70, 90), "b": torch.randn(3).bfloat16()},
        "step": torch.tensor(seed),
        "epoch": seed,
    }


def same(found: dict, wanted: dict) -> None:
    """Bit for bit."""
    import torch  # noqa: PLC0415

    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert torch.equal(found["step"], wanted["step"])
    assert found["epoch"] == wanted["epoch"]


#: In order; those behind `imports` have a cluster.
STEPS: dict[str, Callable[[], None]] = {
    "imports": imports,
    "save, commit, load": native,
    "DCP": dcp_classes,
    "DCP by URL": dcp_url,
}


def main() -> int:
    """Run all steps, whatever becomes of those before."""
    outcome: dict[str, str] = {}

    def run(name: str, step: Callable[[], None]) -> None:
        outcome[name] = ""
        try:
            step()
        # DCP's CheckpointException is no Exception.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            outcome[name] = traceback.format_exc()

    run("imports", imports)
    with tempfile.TemporaryDirectory(prefix="fastcheck-matrix-") as folder, contextlib.ExitStack() as ends:

        def up() -> None:
            from fastcheck.local import LocalCluster  # noqa: PLC0415

            cluster = ends.enter_context(LocalCluster(Path(folder) / "cluster"))
            cluster.up(2, tolerate=1, ram_budget="128MiB")
            os.environ["FASTCHECK_ADDRESS"] = cluster.address("node-0")

        run("cluster", up)
        for name, step in list(STEPS.items())[1:] if not outcome["cluster"] else ():
            run(name, step)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    json.dump({"versions": versions, "steps": outcome}, sys.stdout)
    return int(any(outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
