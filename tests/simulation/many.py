"""Many seeds on a few processes, their outcomes in order of the seeds."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from tests.simulation.run import Outcome, run_seed

CHUNK = 4


def _prepare() -> None:
    # What is imported stays; collecting after each seed need not look at it.
    gc.collect()
    gc.freeze()


def run_seeds(
    seeds: Sequence[int],
    jobs: int,
    plant: Callable[[], AbstractContextManager[object]] | None = None,
) -> Iterator[Outcome]:
    """Run seeds; what is left is not run when the caller stops iterating. `plant` as in `run_seed`."""
    run = partial(run_seed, plant=plant)
    if jobs <= 1 or len(seeds) == 1:
        _prepare()
        try:
            yield from map(run, seeds)
        finally:
            gc.unfreeze()
        return
    # gRPC has threads once imported, and forks badly.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_prepare) as pool:
        yield from pool.imap(run, seeds, chunksize=CHUNK)
