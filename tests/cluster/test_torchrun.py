"""torchrun starts ranks anew after one or a whole node is killed, and with other numbers of them: each time all load
one step, and the losses are those of a run that nothing happened to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from tests.cluster import torchrun_trainer
from tests.cluster.harness import until

from fastcheck import Checkpointer, SupersededError

TRAINER = torchrun_trainer.__file__


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Torchrun:
    """torchrun processes of one job, each in a process group of its own, and what their ranks wrote."""

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir()
        self.running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.running:
            self.kill(process)

    def start(self, address: str, last: int, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--local-addr",
            "127.0.0.1",
            "--rdzv-id",
            "elastic",
            *options,
        ]
        output = (self.out / f"torchrun-{len(self.running)}.log").open("wb")
        process = subprocess.Popen(
            [*command, TRAINER, str(self.out), str(last)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "OMP_NUM_THREADS": "1",
                # A store for each attempt: in one that is kept gloo finds dead ranks' addresses (torch 2.13).
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "FASTCHECK_ADDRESS": address,
                **environment,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def alone(
        self, address: str, ranks: int, last: int, *options: str, **environment: str
    ) -> list[dict[str, Any]]:
        """One torchrun with so many ranks, to its end; what its ranks wrote, by rank."""
        before = {path: path.read_text().count("\n") for path in self.out.glob("*.jsonl")}
        meet = ("--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
        process = self.start(address, last, "--nproc-per-node", str(ranks), *meet, *options, **environment)
        process.wait(timeout=120)
        assert process.returncode == 0, self.output()
        return [
            line for path in sorted(self.out.glob("*.jsonl")) for line in lines(path)[before.get(path, 0) :]
        ]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            # Its workers have sessions of their own.
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()

    def output(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.out.glob("torchrun-*.log")))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(said: list[dict[str, Any]], rank: int = 0) -> list[str]:
    return [line["loss"] for line in said if line["rank"] == rank and "loss" in line]


def loads(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in said if "loaded" in line]


def test_a_killed_rank_other_numbers_of_ranks_and_a_rank_without_a_daemon(make_cluster, tmp_path):
    cluster = make_cluster(3)
    here, wanted = cluster.address("node-0"), torchrun_trainer.reference(10)
    with Torchrun(tmp_path / "out") as torchrun:
        said = torchrun.alone(here, 4, 5, "--max-restarts", "1", TEST_KILL="1@4")
        for rank in range(4):
            assert losses(said, rank) == wanted[:5], "no step is lost and none is done otherwise"
        assert {line["job"] for line in loads(said)} == {"elastic"}
        assert [line["loaded"] for line in loads(said)] == [None, 3] * 4
        assert all(line["own"] and line["stats"]["saved_by"] == 4 for line in loads(said) if line["loaded"])

        # An old rank of four that still lives somewhere: nothing waits for it, and it can spoil nothing.
        with Checkpointer("elastic", rank=3, world_size=4, address=cluster.address("node-1")) as left_over:
            assert left_over.steps()[-1] == 5
            stale = left_over.save(6, {"w": 1})
            said = torchrun.alone(here, 2, 7)
            assert isinstance(stale.exception(timeout=60), SupersededError)
        for rank in range(2):
            assert losses(said, rank) == wanted[5:7]
        assert [(line["loaded"], line["own"], line["stats"]["saved_by"]) for line in loads(said)] == [
            (5, True, 4)
        ] * 2
        assert [line["progress"]["step"] for line in loads(said)] == [5, 5]

        said = torchrun.alone(here, 4, 8)
        for rank in range(4):
            assert losses(said, rank) == wanted[7:8]
        assert [(line["loaded"], line["own"]) for line in loads(said)] == [
            (7, True),
            (7, True),
            (7, False),
            (7, False),
        ]

        said = torchrun.alone(here, 2, 9, TEST_LOST_RANK="1")
        by_rank = {line["rank"]: line for line in said}
        assert by_rank[1]["error"] == "DaemonUnavailableError"
        assert by_rank[0]["error"] == "LoadFailedError"
        assert "rank 1 cannot load (rank 1: DaemonUnavailableError" in by_rank[0]["message"]


def test_a_node_is_killed_with_all_on_it_and_the_other_goes_on_alone(make_cluster, tmp_path):
    cluster = make_cluster(3)
    wanted = torchrun_trainer.reference(6)
    meet = f"127.0.0.1:{free_port()}"

    def elastic(host: bool) -> list[str]:
        patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", meet, "--rdzv-conf", f"{patience},is_host={int(host)}"),
        ]

    with Torchrun(tmp_path / "out") as torchrun:
        survivor = torchrun.start(cluster.address("node-0"), 6, *elastic(host=True))
        victim = torchrun.start(cluster.address("node-1"), 6, *elastic(host=False), TEST_STAND_STILL="4")
        until((torchrun.out / "still").exists, "the victim to stand still in step 4", 60)
        cluster.kill("node-1", wipe=True)
        torchrun.kill(victim)
        survivor.wait(timeout=90)
        assert survivor.returncode == 0, torchrun.output()
        said = [line for path in sorted(torchrun.out.glob("*.jsonl")) for line in lines(path)]
        resumed = [line for line in loads(said) if line["loaded"]]
        assert [(line["loaded"], line["world"], line["stats"]["saved_by"]) for line in resumed] == [(3, 1, 2)]
        alone = [line for line in said if line["world"] == 1]
        assert losses(alone) == wanted[3:]
