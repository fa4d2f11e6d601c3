"""One rank of a job whose ranks train in lockstep, as a process: an all-reduce, then a save, step after step.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python -m tests.cluster.lockstep_rank JOB ADDRESS [options]

It prints one line of JSON per event: {"loaded": STEP or null}, {"committed": STEP}, {"failed": STEP, "error": TEXT}.
It ends, in order, when its stdin is closed: all ranks after the same step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from typing import Any

import torch
from torch import distributed

from fastcheck import Checkpointer, SaveHandle


def state_of(step: int, rank: int, megabytes: float) -> dict[str, Any]:
    """What a rank saves: every bit follows from step and rank, and most differ from the step before."""
    generator = torch.Generator().manual_seed(step * 1009 + rank)
    count = int(megabytes * 262144) // 4
    return {"model": {f"layer{i}": torch.randn(count, generator=generator) for i in range(4)}, "step": step}


def tell(**event: object) -> None:
    """One line to whoever steers this process."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("address")
    parser.add_argument("--megabytes", type=float, default=38)
    parser.add_argument("--pause", type=float, default=0.3)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    stopping = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopping.set()), daemon=True).start()
    ckpt = Checkpointer(options.job, address=options.address)
    state = state_of(0, rank, options.megabytes)
    step = ckpt.load(state)
    if step is not None:
        wanted = state_of(step, rank, options.megabytes)
        assert all(torch.equal(t, wanted["model"][name]) for name, t in state["model"].items())
    tell(loaded=step)
    step = step or 0
    pending: list[SaveHandle] = []
    while True:
        together = torch.tensor([float(stopping.is_set())])
        distributed.all_reduce(together)
        if together.item():
            break
        step += 1
        state = state_of(step, rank, options.megabytes)
        pending.append(ckpt.save(step, state))
        time.sleep(options.pause)  # what a training step takes
        for handle in [h for h in pending if h.done]:
            pending.remove(handle)
            error = handle.exception()
            tell(committed=handle.step) if error is None else tell(failed=handle.step, error=repr(error))
    ckpt.close()


if __name__ == "__main__":
    main()
