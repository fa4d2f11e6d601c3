"""Runs of a framework's training, killed or stopped wherever a test says, and gone on with by new processes.

The processes are forked from one that has imported the frameworks, which takes longer than the runs. Each is a real one
that dies by SIGKILL, with sessions, memory and random states of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tests.cluster.harness import until
from tests.forks import Fork, call

from fastcheck import Checkpointer
from fastcheck.local import LocalCluster
from fastcheck.local.ports import find_free_ports

#: Of one run; most of it is waiting for others on this machine.
RUN_S = 180.0


@dataclass(frozen=True)
class End:
    """How a run ends, and the step that the next one goes on from.

    `killed`: right before the step after `step` is computed, once `step` is committed. `validating`: while it validates
    after `step`, once the step before is. `stopped`: the framework is asked to stop after `step`, in good order.
    """

    how: Literal["killed", "validating", "stopped"]
    step: int

    @property
    def resumes(self) -> int:
        return self.step - 1 if self.how == "validating" else self.step


@dataclass(frozen=True)
class Rank:
    """What one process of a run is told."""

    job: str
    rank: int
    world_size: int
    address: str
    out: Path
    options: dict[str, Any]
    end: End | None

    def tell(self, **what: Any) -> None:
        """A line for the test; it is there even if the process is killed right after."""
        with self.out.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def tell_end(self, model: torch.nn.Module) -> None:
        """What became of the model."""
        digest = hashlib.sha256()
        for tensor in model.state_dict().values():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        self.tell(final=digest.hexdigest())

    def checkpointer(self, **options: Any) -> Checkpointer:
        return Checkpointer(self.job, address=self.address, **options)

    def kill_if(self, how: str, step: int, newest: Callable[[], int]) -> None:
        """SIGKILL where this run is to end, as soon as there is what the next one is to find."""
        if self.end == End(how, step):  # type: ignore[arg-type]
            self._await(newest)
            os.kill(os.getpid(), signal.SIGKILL)

    def stop_if(self, step: int) -> bool:
        """Whether the framework is to be asked to stop now."""
        return self.end == End("stopped", step)

    def close(self, ckpt: Checkpointer) -> None:
        """Leave when the last step of a run that was stopped is committed."""
        if self.end is not None:
            self._await(lambda: newest_in(ckpt))
        ckpt.close()

    def _await(self, newest: Callable[[], int]) -> None:
        assert self.end is not None
        wanted = self.end.resumes
        until(lambda: newest() >= wanted, f"step {wanted} to be saved for good")


def newest_in(ckpt: Checkpointer) -> int:
    """The newest committed step, 0 if there is none."""
    return max(ckpt.steps(), default=0)


def _enter(train: Callable[[Rank], None], rank: Rank, port: int, enabled: bool) -> None:
    """The forked process."""
    rank.out.touch()
    with rank.out.with_suffix(".log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    own = {
        "RANK": rank.rank,
        "WORLD_SIZE": rank.world_size,
        "LOCAL_RANK": rank.rank,
        "LOCAL_WORLD_SIZE": rank.world_size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": rank.job,  # how Lightning knows that torchrun started it
        "CUDA_VISIBLE_DEVICES": "",
        **({} if enabled else {"FASTCHECK_DISABLE": 1}),
    }
    if rank.world_size > 1 or not enabled:
        os.environ |= {name: str(value) for name, value in own.items()}
    if rank.world_size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
    torch.set_num_threads(1)
    try:
        train(rank)
    except BaseException:  # noqa: BLE001  nobody else would see it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # not what a framework does at exit in a process that it did not start


class Runs:
    """Starts runs of `train` on a cluster and compares them with one that nothing ends."""

    def __init__(self, cluster: LocalCluster, folder: Path, preload: Sequence[str]) -> None:
        self._cluster = cluster
        self._folder = folder
        self._number = 0
        self._preload = (__name__, *preload)

    def run(
        self,
        train: Callable[[Rank], None],
        job: str,
        world_size: int,
        options: dict[str, Any],
        end: End | None,
        *,
        enabled: bool = True,
    ) -> list[list[dict[str, Any]]]:
        """One run; what each rank told."""
        (port,) = find_free_ports(1)
        self._number += 1
        nodes = self._cluster.node_ids
        ranks = [
            Rank(
                job,
                number,
                world_size,
                self._cluster.address(nodes[number % len(nodes)]),
                self._folder / f"{job}-{self._number}-{number}.json",
                options,
                end,
            )
            for number in range(world_size)
        ]
        processes: list[Fork] = []
        wanted = 0 if end is None or end.how == "stopped" else -signal.SIGKILL
        try:
            for rank in ranks:
                processes.append(call(_enter, train, rank, port, enabled, preload=self._preload))
            for process, rank in zip(processes, ranks, strict=True):
                ended = process.wait(RUN_S)
                log = (
                    rank.out.with_suffix(".log").read_text() if rank.out.with_suffix(".log").exists() else ""
                )
                assert ended == wanted, f"{end}, rank {rank.rank}: {ended}\n{log[-4000:]}"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [[json.loads(line) for line in rank.out.read_text().splitlines()] for rank in ranks]

    def go_on_as_if_nothing_had_happened(
        self,
        train: Callable[[Rank], None],
        job: str,
        world_size: int,
        ends: Sequence[End],
        **options: Any,
    ) -> None:
        """Runs that end so, one after the other, and a last one: steps, losses and weights of an uninterrupted run."""
        whole = self.run(train, job, world_size, options, None, enabled=False)
        losses = [{each["step"]: each for each in told if "loss" in each} for told in whole]
        assert world_size == 1 or losses[0] != losses[1], "each rank has numbers of its own"
        begun = 0
        for end in [*ends, None]:
            found = self.run(train, job, world_size, options, end)
            for rank, told in enumerate(found):
                where = f"rank {rank}, resumed after step {begun}, until {end}"
                assert told[0] == {"begins": begun}, where
                mine = [each for each in told if "loss" in each]
                last = max(losses[rank]) if end is None else end.step
                assert [each["step"] for each in mine] == list(range(begun + 1, last + 1)), where
                assert mine == [losses[rank][each["step"]] for each in mine], where
                if end is None:
                    assert told[-1] == whole[rank][-1], f"{where}: other weights"
            begun = 0 if end is None else end.resumes
