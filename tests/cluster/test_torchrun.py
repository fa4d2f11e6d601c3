"""torchrun: the guide's example, and a job that loses a rank, a node, and a daemon. Each time all ranks load one step
or none, and the losses are those of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

from tests.cluster import torchrun_trainer
from tests.cluster.guides import NODE, Example, begun, losses_in, newest_commit
from tests.cluster.harness import until
from tests.cluster.torchrun import Launcher
from tests.sockets import free_port

from fastcheck import Checkpointer, FencedError, SupersededError
from fastcheck.local import LocalCluster

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "guides" / "fsdp2.md"
TRAINER = torchrun_trainer.__file__
JOB = "elastic"
#: Of the guide's example: enough for its daemon to be killed before they are done.
STEPS = 60


class Run:
    """One run of torchrun_trainer after the other, of one job: what their ranks noted."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.out = folder / "out"
        self.out.mkdir()
        self.launchers: list[Launcher] = []
        self._read: dict[Path, int] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        for launcher in self.launchers:
            launcher.kill()

    def start(self, node: str, last: int, ranks: int, *options: str, **environment: str) -> Launcher:
        """torchrun on that node, with so many ranks there, up to a step."""
        log = self.out / f"torchrun-{len(self.launchers)}.log"
        command = ["--rdzv-backend", "c10d", "--rdzv-id", JOB, "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(ranks), *options, TRAINER, str(self.out), str(last)]
        address = self.cluster.address(node)
        self.launchers.append(Launcher(log, *command, FASTCHECK_ADDRESS=address, **environment))
        return self.launchers[-1]

    def noted(self) -> list[dict[str, Any]]:
        """By all ranks since the last call; by rank, in its order."""
        found = []
        for path in sorted(self.out.glob("*.jsonl")):
            lines = path.read_text().splitlines()
            found += [json.loads(line) for line in lines[self._read.get(path, 0) :]]
            self._read[path] = len(lines)
        return found


def losses(noted: list[dict[str, Any]], rank: int, world: int) -> list[str]:
    return [
        line["loss"] for line in noted if (line["rank"], line["world"]) == (rank, world) and "loss" in line
    ]


def loads(noted: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in noted if "loaded" in line]


def elastic_pair() -> tuple[list[str], list[str]]:
    """Options for two launchers that meet, and for one that goes on alone when it hears nothing of the other."""
    patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    here = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return (
        [*here, "--rdzv-conf", f"{patience},is_host=1"],
        [*here, "--rdzv-conf", f"{patience},is_host=0"],
    )


def test_one_job_loses_a_rank_then_a_node_and_grows_again_past_a_rank_without_a_daemon(
    make_cluster, tmp_path
):
    """Four ranks on two nodes; two when one node is gone; four again on one."""
    wanted = torchrun_trainer.reference(8)
    with Run(make_cluster(3), tmp_path) as run:
        host, guest = elastic_pair()
        survivor = run.start("node-0", 6, 2, *host, TEST_KILL="1@3")
        victim = run.start("node-1", 6, 2, *guest, TEST_KILL="1@3", TEST_STAND_STILL="5")
        until(lambda: len(list(run.out.glob("still-*"))) == 2, "node 1's ranks to stand still in step 5", 120)
        noted = run.noted()
        # Rank 1 was killed before its step 3: all four are new, and load what all had.
        assert loads(noted, "world", "job", "loaded") == [(4, JOB, None), (4, JOB, 2)] * 4
        assert all(own for own, loaded in loads(noted, "own", "loaded") if loaded)

        run.cluster.kill("node-1", wipe=True)
        victim.kill()
        survivor.finish()
        noted += run.noted()
        for rank in range(4):
            assert losses(noted, rank, 4) == wanted[:4], "no step is lost, and none is done otherwise"
        # Two do what four did, from where all four were.
        two = [line for line in noted if line["world"] == 2]
        assert loads(two, "loaded", "own", "saved_by") == [(4, True, 4)] * 2
        assert [line["progress"]["step"] for line in two if "progress" in line] == [4, 4]
        assert all(heard for (heard,) in loads(two, "heard")), "a load by parts tells how far it is"
        assert losses(noted, 0, 2) == losses(noted, 1, 2) == wanted[4:6]

        # A process that took rank 1's place, and lives on while torchrun starts everything anew.
        with Checkpointer(JOB, rank=1, world_size=2, address=run.cluster.address("node-2")) as old:
            stale = old.save(7, {"w": 1})
            meet = ["--nnodes", "1", "--max-restarts", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
            run.start("node-0", 8, 4, *meet, TEST_LOST_RANK="3", TEST_DISK="5").finish()
            assert isinstance(stale.exception(timeout=60), FencedError | SupersededError)
            assert isinstance(old.save(9, {"w": 1}).exception(timeout=60), FencedError)
        noted = run.noted()
        # In the first attempt one cannot reach a daemon: no rank has anything from memory, all know why, none hangs.
        assert [line["newer"] for line in noted if "newer" in line] == [None, 6] * 4
        errors = {line["rank"]: (line["error"], line["message"]) for line in noted if "error" in line}
        assert [errors[rank][0] for rank in range(4)] == ["LoadFailedError"] * 3 + ["DaemonUnavailableError"]
        assert all("rank 3 cannot load (rank 3: DaemonUnavailable" in errors[rank][1] for rank in range(3))
        # In the second it can, and four do what two did; what is per rank is not the new ones' own, and they know.
        assert loads(noted, "loaded", "own", "saved_by") == [(6, rank < 2, 2) for rank in range(4)]
        for rank in range(4):
            assert losses(noted, rank, 4) == wanted[6:8]


def test_the_fsdp2_example_is_killed_resumed_left_without_a_daemon_and_given_another_rank(
    make_cluster, tmp_path
):
    cluster = make_cluster(2)
    at_home = {"FASTCHECK_ADDRESS": cluster.address(NODE)}

    def options(ranks: int) -> list[object]:
        """Those of the command in the guide."""
        (line,) = re.findall(r"^torchrun (.*--nproc-per-node 2 .*)$", GUIDE.read_text(), re.MULTILINE)
        *words, script = shlex.split(line.replace("--nproc-per-node 2", f"--nproc-per-node {ranks}"))
        assert script == "docs/guides/examples/fsdp2.py"
        return [*words, REPOSITORY / script]

    # Turned off by one variable: what it computes then is what the others have to.
    launchers = [Launcher(tmp_path / "whole.log", *options(2), FASTCHECK_DISABLE="1")]
    first = Example(cluster, tmp_path / "first.log", "-m", "torch.distributed.run", *options(2))
    try:
        first.read_until(lambda: 14 in first.losses)
        pids = begun(first.lines, 2)
        os.kill(max(pids), signal.SIGSTOP)  # the other one waits for it in its next collective
        until(lambda: newest_commit(cluster, "gpt") >= 10, "a commit from step 10 on")
        for pid in (first.process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        launchers[0].finish()
        whole = losses_in(launchers[0].lines)
        assert set(begun(launchers[0].lines, 2).values()) == {0} == set(pids.values())
        assert list(whole) == list(range(1, STEPS + 1))
        assert first.losses.items() <= whole.items()

        second = Launcher(tmp_path / "second.log", *options(2), **at_home)
        launchers.append(second)
        pids = second.until(lambda: begun(second.lines, 2), "both ranks to have loaded")
        (resumed_at,) = set(pids.values())
        assert resumed_at >= 10
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that there are steps left to do without a daemon
        cluster.kill(NODE)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        second.finish()
        assert losses_in(second.lines) == {step: loss for step, loss in whole.items() if step > resumed_at}

        cluster.start(NODE)
        until(lambda: newest_commit(cluster, "gpt") >= resumed_at, "the steps that are kept")
        third = Launcher(tmp_path / "third.log", *options(3), **at_home)
        launchers.append(third)
        third.finish()
        (newest,) = set(begun(third.lines, 3).values())
        assert resumed_at <= newest < STEPS
        losses = losses_in(third.lines)
        # Three draw other data than two. But before they learn from it they are what the two were.
        assert list(losses) == list(range(newest + 1, STEPS + 1))
        assert losses[newest + 1] == whole[newest + 1]
    finally:
        first.stop()
        for launcher in launchers:
            launcher.kill()
