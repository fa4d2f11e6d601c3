"""One rank of the soak's job: takes steps of AdamW that all follow from its number, and saves each.

    python -m tests.soak.trainer JOB ADDRESS RANK WORLD_SIZE PARAMETERS [PORT]

With a port the ranks form a process group (gloo) and agree on what they load. A line of JSON in, one or more out:
    (at the start)   {"loaded": STEP or null, "digest": HEX, "seconds": S}
    {"go": 5}        {"saving": 5, "digest": HEX}, {"saved": 5, "seconds": S}
    (any time)       {"committed": 5} or {"failed": 5, "error": TEXT}
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import distributed

from fastcheck import Checkpointer, SaveHandle

JOB = "soak"
_lock = threading.Lock()


def tell(**event: object) -> None:
    """One line to the soak."""
    with _lock:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


class Model:
    """A rank's parameters and their optimizer: 12 bytes of state per parameter."""

    def __init__(self, rank: int, parameters: int) -> None:
        self.rank = rank
        self.weights = torch.nn.Parameter(torch.zeros(parameters))
        self.optimizer = torch.optim.AdamW([self.weights], lr=1e-3, foreach=False)
        self.train(0)

    @property
    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "optimizer": self.optimizer}

    def train(self, step: int) -> None:
        """One step; its gradient follows from rank and step."""
        random = torch.Generator().manual_seed(step * 1009 + self.rank)
        self.weights.grad = torch.randn(self.weights.numel(), generator=random) * 1e-3
        self.optimizer.step()

    def digest(self) -> str:
        """Of all that is saved."""
        moments = self.optimizer.state[self.weights]
        found = xxhash.xxh3_128()
        for tensor in (self.weights.detach(), moments["exp_avg"], moments["exp_avg_sq"], moments["step"]):
            found.update(tensor.reshape(-1).numpy())
        return found.hexdigest()


def follow(handle: SaveHandle) -> None:
    """Tell how a save ends."""
    error = handle.exception(timeout=None)
    if error is None:
        tell(committed=handle.step)
    else:
        tell(failed=handle.step, error=f"{type(error).__name__}: {error}"[:300])


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    job, address, *numbers = sys.argv[1:]
    rank, world_size, parameters, *port = map(int, numbers)
    if port:
        distributed.init_process_group(
            "gloo",
            f"tcp://127.0.0.1:{port[0]}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
    model = Model(rank, parameters)
    ckpt = Checkpointer(job, rank=rank, world_size=world_size, address=address)
    started = time.monotonic()
    while True:
        try:
            loaded = ckpt.load(model.state)
            break
        except Exception as error:  # a launcher would start the trainer again: so do we, and count it
            tell(load_failed=f"{type(error).__name__}: {error}"[:300])
            if time.monotonic() - started > 90:
                raise
            time.sleep(0.5)  # what a launcher pauses for
    tell(loaded=loaded, digest=model.digest(), seconds=time.monotonic() - started)
    for line in sys.stdin:
        step = json.loads(line)["go"]
        model.train(step)
        tell(saving=step, digest=model.digest())
        began = time.monotonic()
        handle = ckpt.save(step, model.state)
        tell(saved=step, seconds=time.monotonic() - began)
        threading.Thread(target=follow, args=(handle,), daemon=True).start()
    ckpt.close()


if __name__ == "__main__":
    main()
