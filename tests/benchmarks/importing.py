"""What `import fastcheck` costs a trainer that imports torch and grpc anyway: in fresh interpreters, behind those two.

Byte code lies ready, as after an installation: the first interpreter writes it and does not count. Each stage is timed
inside the interpreter: the difference of two interpreters' whole times would drown in what torch itself takes.
Python's collector is shown apart: a full collection goes through all that torch has made, whoever's turn it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from .report import Figure

ROUNDS_MIN = 15
GOAL = "<= 150 ms"
ALONE = "import torch, grpc"
#: In this order, in one interpreter; the first is what the others are added to.
STAGES = (ALONE, "import fastcheck", "from fastcheck import Checkpointer")
_PROGRAM = """
import gc, json, sys, time
collected_s = 0.0
def on_collection(phase, _info):
    global collected_s
    collected_s += time.process_time() * (1 if phase == "stop" else -1)
gc.callbacks.append(on_collection)
def mark():
    used = time.process_time()
    return time.perf_counter(), used, used - collected_s
marks = [mark()]
for stage in json.loads(sys.argv[1]):
    exec(stage)
    marks.append(mark())
print(json.dumps(marks))
"""


def importing(rounds: int, say: Callable[[str], None], *, quick: bool) -> list[Figure]:
    """Milliseconds that torch and grpc take, on the clock and of CPU, and what FastCheck adds: all up to a stage."""
    runs: list[list[tuple[float, float, float]]] = []
    with tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder:
        _run(folder)
        for number in range(rounds if quick else max(rounds, ROUNDS_MIN)):
            runs.append(_run(folder))
            say(f"round {number + 1} of imports")
    figures = []
    for index, unit in enumerate(("wall", "CPU", "CPU but for collections")):
        alone = [(run[1][index] - run[0][index]) * 1e3 for run in runs]
        figures.append(Figure(f"{ALONE}, {unit}", "ms", alone))
        for stage, name in enumerate(STAGES[1:], start=2):
            added = [(run[stage][index] - run[1][index]) * 1e3 for run in runs]
            figures.append(Figure(f"{name} adds, {unit}", "ms", added, goal=GOAL))
    return figures


def _run(bytecode: str) -> list[tuple[float, float, float]]:
    """One interpreter's seconds on the clock, of CPU (user and system), and of that without collections.

    Before the first stage, and behind each.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(STAGES)],
        env=environment | {"PYTHONPYCACHEPREFIX": bytecode},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: list[tuple[float, float, float]] = json.loads(done.stdout)
    return found
