"""One rank of a job in a process of its own that does what it is told: to be stopped, killed and superseded.

    python -m tests.cluster.steered_rank JOB ADDRESS MEGABYTES [RANK WORLD_SIZE]

Its state is one tensor of bytes that all have the same value. A line of JSON in, one out, until stdin ends:
    {"load": null}             {"loaded": STEP or null, "mark": VALUE}   the newest committed step; VALUE -1: a mixture
    {"save": 3, "mark": 7}     {"saving": 3}, then {"saved": 3}          `save` is called; it has returned
    {"end_of": 3}              {"end_of": 3, "error": TEXT or null}      the handle of step 3 has ended
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from fastcheck import Checkpointer, FastCheckError, SaveHandle

END_S = 60.0


def tell(**event: object) -> None:
    """One line to whoever steers."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    job, address, megabytes, *place = sys.argv[1:]
    rank, world_size = map(int, place or ("0", "1"))
    state = {"x": torch.zeros(int(float(megabytes) * 2**20), dtype=torch.uint8)}
    handles: dict[int, SaveHandle] = {}
    ckpt = Checkpointer(job, rank=rank, world_size=world_size, address=address)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if "load" in asked:
            step = ckpt.load(state)
            low, high = int(state["x"].min()), int(state["x"].max())
            tell(loaded=step, mark=low if low == high else -1)
        elif "save" in asked:
            state["x"].fill_(asked["mark"])
            tell(saving=asked["save"])
            handles[asked["save"]] = ckpt.save(asked["save"], state)
            tell(saved=asked["save"])
        else:
            error = None
            try:
                handles[asked["end_of"]].result(timeout=END_S)
            except FastCheckError as found:
                error = f"{type(found).__name__}: {found}"
            tell(end_of=asked["end_of"], error=error)
    ckpt.close()


if __name__ == "__main__":
    main()
