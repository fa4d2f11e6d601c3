"""Cores of their own for some processes: what else runs on a machine is then not measured along with them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch


def halves(cores: Iterable[int], siblings: dict[int, int] | None = None) -> tuple[list[int], list[int]]:
    """Two halves of some cores. Hardware threads of one core stay together, where there is more than one core.

    Args:
        siblings: hardware thread → the first one of its core; by default as the kernel says.
    """
    known = {core: _first_sibling(core) for core in cores} if siblings is None else siblings
    ordered = sorted(cores, key=lambda core: (known[core], core))
    borders = [i for i in range(1, len(ordered)) if known[ordered[i - 1]] != known[ordered[i]]]
    half = min(borders or [len(ordered) // 2], key=lambda border: abs(border - len(ordered) / 2))
    return ordered[:half], ordered[half:]


@contextlib.contextmanager
def apart(others: Iterable[int]) -> Iterator[None]:
    """This process on one half of its cores, with as many torch threads; the processes `others` on the other half."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    mine, theirs = halves(cores)
    for pid in others:
        _pin(pid, theirs)
    _pin(os.getpid(), mine)
    torch.set_num_threads(len(mine))
    try:
        yield
    finally:
        _pin(os.getpid(), sorted(cores))
        torch.set_num_threads(threads)


def _pin(pid: int, cores: Sequence[int]) -> None:
    """All threads that there are; those to come inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def _first_sibling(core: int) -> int:
    text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    return int(text.replace("-", ",").split(",")[0])
