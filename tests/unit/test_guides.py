"""The guides keep their word: every example is run by a test, and commands that need a scheduler are at least right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
EXAMPLES = sorted((GUIDES / "examples").glob("*.py"))


def scripts(page: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", (GUIDES / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_example_is_run_by_a_test_and_shown_by_a_guide(example):
    tests = [
        path.name for path in (ROOT / "tests/cluster").glob("test_*.py") if example.name in path.read_text()
    ]
    assert tests, f"{example.name} is run by no test"
    assert any(f"examples/{example.name}" in page.read_text() for page in GUIDES.glob("*.md"))


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)


def test_the_slurm_script_starts_torchrun_on_every_node_under_the_jobs_name(tmp_path):
    """With stand-ins for Slurm's commands; torchrun's own parser reads what it would have been given."""
    (script,) = [each for each in scripts("fsdp2.md") if "#SBATCH" in each]
    stand_in(tmp_path, "srun", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])")
    nodes = "assert sys.argv[1:] == ['show', 'hostnames', 'n[1-4]']; print('n1', 'n2', 'n3', 'n4', sep='\\n')"
    stand_in(tmp_path, "scontrol", f"import sys; {nodes}")
    said = "{k: v for k, v in os.environ.items() if k.startswith(('FASTCHECK', 'TORCH'))}"
    stand_in(tmp_path, "torchrun", f"import json, os, sys; print(json.dumps([sys.argv[1:], {said}]))")
    slurm = {
        "SLURM_NNODES": "4",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_JOB_NAME": "gpt",
        "SLURM_JOB_ID": "7",
    }
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = subprocess.run(
        ["bash", "-eu", "-c", script],
        env=path | slurm,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    options, environment = json.loads(found.stdout)
    config, _, command = run.config_from_args(run.parse_args(options))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (4, 4, 8, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "n1:29500", "gpt")
    assert command[-1] == "train.py"
    assert environment == {
        "FASTCHECK_ADDRESS": "unix:///run/fastcheck/fastcheckd.sock",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
