"""The README's example, as it stands there, run by a new user: once, and again after the node was lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return code


def run(code: str, address: str) -> str:
    environment = {
        **os.environ,
        "FASTCHECK_ADDRESS": address,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_is_about_twenty_lines():
    assert len(example().strip().splitlines()) <= 20


def test_the_example_commits_and_goes_on_after_its_node_was_lost(make_cluster):
    cluster = make_cluster(3)
    assert "committed: [9, 10]" in run(example(), cluster.address("node-0"))
    cluster.kill("node-0", wipe=True)
    cluster.start("node-0")
    assert "committed: [19, 20]" in run(example(), cluster.address("node-0"))
