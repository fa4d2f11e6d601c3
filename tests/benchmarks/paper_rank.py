"""A rank of the paper's experiment: a process in its node's namespace that trains, saves and loads when told to.

One command per line comes in as JSON, one answer per line goes out. Every timed command answers with its seconds, the
bytes that crossed this namespace's interface, and how many of the machine's cores were busy. Loads are checked: the
state is cleared before and compared with what was saved after. It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

from fastcheck import Checkpointer

from .paper_training import Ensemble

INTERFACE = "eth0"
SAVE_TIMEOUT_S = 600.0
#: fsspec sends so much at a time; its default of 64 KiB would make each a connection of its own.
WRITE_BLOCK_BYTES = 16 << 20
#: And takes so much from the socket at once.
READ_BLOCK_BYTES = 1 << 20
#: Lossy moments: no error is larger, in parts of the tensor's largest (half a step of second moments is a 16th).
INDEX8_ERROR = 0.08


class Rank:
    """The commands, one method each; arguments are the command's other fields."""

    def __init__(self, number: int, folder: Path) -> None:
        self._number, self._folder = number, folder
        self._ensemble: Ensemble | None = None
        self._seeds: list[int] = []
        self._checkpointers: dict[tuple[str, str], Checkpointer] = {}

    @property
    def ensemble(self) -> Ensemble:
        assert self._ensemble is not None, "told to work before it was told what on"
        return self._ensemble

    def take_up(self, seeds: list[int], stage: int) -> dict[str, Any]:
        """Go on from a stage with these models."""
        self.forget()
        if seeds != self._seeds:
            self._seeds, self._ensemble = seeds, Ensemble(self._folder, seeds)
        self.ensemble.take_up(stage)
        tensors = self.ensemble.parameters + self.ensemble.moments
        return {"state_bytes": sum(t.numel() * t.element_size() for t in tensors)}

    def train(self) -> dict[str, Any]:
        """One step of every model."""
        return {"losses": self.ensemble.step()}

    def save(self, address: str, job: str, step: int, world_size: int, precision: str) -> dict[str, Any]:
        """From the call of `save` until the step is committed."""
        checkpointer = self._checkpointer(address, job, world_size, precision)
        with _measured() as figures:
            handle = checkpointer.save(step, self.ensemble.state)
            handle.result(timeout=SAVE_TIMEOUT_S)
        stats = handle.stats
        return figures | {"ratio": stats["ratio"], "stage_s": stats["stage_s"]}

    def load(self, address: str, job: str, world_size: int, precision: str) -> dict[str, Any]:
        """From the call of `load` until the state is filled, by a trainer that has just started."""
        self.forget()
        checkpointer = self._checkpointer(address, job, world_size, precision)
        checkpointer.steps()  # connects; a trainer has done so long before
        with self._cleared(exact=precision == "exact"), _measured() as figures:
            if checkpointer.load(self.ensemble.state) is None:
                raise RuntimeError(f"job {job} has no step to load")
        self.forget()
        return figures

    def remote_save(self, url: str, master: str, world_size: int) -> dict[str, Any]:
        """From the call of `save` until the server has everything."""
        alone = self._join(master, world_size)
        state = self.ensemble.state_dict(f"rank{self._number}")
        with _measured() as figures:
            dcp.save(state, storage_writer=FsspecWriter(url, block_size=WRITE_BLOCK_BYTES), no_dist=alone)
        return figures

    def remote_load(self, url: str, master: str, world_size: int) -> dict[str, Any]:
        """From the call of `load` until the state is filled."""
        alone = self._join(master, world_size)
        # FTP has no reading of a range but to break off a transfer, and readers that go back would fetch a file twice:
        # fsspec fetches each file once, into memory, and DCP reads it there.
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, self._cleared(exact=True):
            reader = FsspecReader(
                f"simplecache::{url}",
                ftp={"block_size": READ_BLOCK_BYTES},
                simplecache={"cache_storage": folder},
            )
            # Tensors of the models and optimizers themselves: `load` fills them in place.
            state = self.ensemble.state_dict(f"rank{self._number}")
            with _measured() as figures:
                dcp.load(state, storage_reader=reader, no_dist=alone)
        return figures

    def forget(self) -> dict[str, Any]:
        """Close all Checkpointers."""
        for checkpointer in self._checkpointers.values():
            checkpointer.close()
        self._checkpointers.clear()
        return {}

    def _join(self, master: str, world_size: int) -> bool:
        """Whether this rank saves alone; if not, it is in the process group afterwards."""
        if world_size > 1 and not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"tcp://{master}", rank=self._number, world_size=world_size
            )
        return world_size == 1

    def _checkpointer(self, address: str, job: str, world_size: int, precision: str) -> Checkpointer:
        key = address, job
        if key not in self._checkpointers:
            rank = self._number if world_size > 1 else 0
            self._checkpointers[key] = Checkpointer(
                job, rank=rank, world_size=world_size, address=address, precision=precision
            )
        return self._checkpointers[key]

    @contextlib.contextmanager
    def _cleared(self, *, exact: bool) -> Iterator[None]:
        """Clear the state, let it be loaded, and compare; training goes on with the exact numbers."""
        parameters, moments = self.ensemble.parameters, self.ensemble.moments
        saved = [t.detach().clone() for t in parameters + moments]
        with torch.no_grad():
            for tensor in parameters + moments:
                tensor.zero_()
        yield
        found = self.ensemble.parameters + self.ensemble.moments
        with torch.no_grad():
            for index, (wanted, tensor) in enumerate(zip(saved, found, strict=True)):
                if exact or index < len(parameters):
                    same = torch.equal(wanted.view(torch.int32), tensor.view(torch.int32))
                else:
                    same = bool((wanted - tensor).abs().max() <= INDEX8_ERROR * wanted.abs().max())
                if not same:
                    raise RuntimeError(f"tensor {index} came back different from what was saved")
                tensor.copy_(wanted)


@contextlib.contextmanager
def _measured() -> Iterator[dict[str, Any]]:
    """Fills in what it yields when the block ends."""
    figures: dict[str, Any] = {}
    wire, cpu, started = _wire_bytes(), _busy_s(), time.perf_counter()
    yield figures
    seconds = time.perf_counter() - started
    sent, received = (now - then for now, then in zip(_wire_bytes(), wire, strict=True))
    figures |= {"seconds": seconds, "sent_bytes": sent, "received_bytes": received}
    figures["cores_busy"] = (_busy_s() - cpu) / seconds


def _wire_bytes() -> tuple[int, int]:
    """Bytes that this namespace has sent and received. Packets handed over in one piece count one header."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == INTERFACE:
            fields = columns.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"no interface {INTERFACE} here")


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def main() -> None:
    """Answer until there are no more commands."""
    torch.set_num_threads(1)  # the machine's cores are for all nodes
    rank = Rank(int(sys.argv[1]), Path(sys.argv[2]))
    # Libraries may print: answers have a descriptor of their own.
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        command = json.loads(line)
        work: Callable[..., dict[str, Any]] = getattr(rank, command.pop("do"))
        try:
            answer = work(**command)
        except (Exception, CheckpointException) as error:  # noqa: BLE001  the asking side raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    rank.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
