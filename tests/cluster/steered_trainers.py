"""The trainers of a job in a process of their own, which save when they are told to.

    python -m tests.cluster.steered_trainers JOB ADDRESS...        one rank per address

A line of JSON in, one out, until there is no more:
    {"save": 3}    {"saved": 3}       every rank's `save` has returned
    {"end_of": 3}  {"errors": {}}     every handle of step 3 has ended; by rank, what those say that did not commit it
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from fastcheck import Checkpointer, FastCheckError

END_S = 60.0


def state_of(step: int, rank: int) -> dict[str, Any]:
    """What a rank saves: every bit follows from step and rank."""
    generator = torch.Generator().manual_seed(step * 1009 + rank)
    layers = {f"layer{i}": torch.randn(65536, generator=generator) for i in range(4)}
    return {"model": layers, "step": step, "rank": rank}


def main() -> None:
    """Serve until stdin ends."""
    job, *addresses = sys.argv[1:]
    ranks = [
        Checkpointer(job, rank=rank, world_size=len(addresses), address=address)
        for rank, address in enumerate(addresses)
    ]
    handles = {}
    for line in sys.stdin:
        (what, step), *_ = json.loads(line).items()
        if what == "save":
            handles[step] = [ckpt.save(step, state_of(step, rank)) for rank, ckpt in enumerate(ranks)]
            answer: dict[str, Any] = {"saved": step}
        else:
            answer = {"errors": {}}
            for rank, handle in enumerate(handles[step]):
                try:
                    handle.result(timeout=END_S)
                except FastCheckError as error:
                    answer["errors"][rank] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for ckpt in ranks:
        ckpt.close()


if __name__ == "__main__":
    main()
