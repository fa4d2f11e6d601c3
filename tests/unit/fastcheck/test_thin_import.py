"""`import fastcheck` brings neither the daemon's libraries nor other frameworks."""

import functools
import json
import subprocess
import sys

import pytest

#: The daemon's, the command line's, and frameworks that a trainer may not have or not use.
FOREIGN = {
    *("fastcheckd", "pysyncobj", "psutil", "yaml", "xxhash", "zstandard", "grpc_health", "click", "rich"),
    *("transformers", "accelerate", "lightning", "torchdata", "fsspec", "safetensors"),
}
#: Brings sympy and much more.
DCP = {"torch.distributed.checkpoint", "fastcheck.dcp"}


@functools.cache
def added_by(code: str) -> set[str]:
    """Modules that are there after it and were not there after torch and grpc."""
    program = (
        "import sys, json, torch, grpc\n"
        "before = set(sys.modules)\n"
        f"{code}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("code", ["import fastcheck", "from fastcheck import *"])
def test_what_an_import_brings(code):
    added = added_by(code)
    assert "fastcheck.errors" in added
    assert not {name.partition(".")[0] for name in added} & FOREIGN
    assert not added & DCP


def test_the_package_itself_brings_no_trainer():
    assert not {name for name in added_by("import fastcheck") if name.startswith("fastcheck.state")}
