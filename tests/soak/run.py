"""One soak: trains, has faults fall, and sees to it that all comes back before the next one that costs copies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tests.soak.account import HANG_S, Account
from tests.soak.faults import VOTERS, Cluster, Faults
from tests.soak.job import JOB, Job, RankEndedError

from fastcheck import FastCheckError
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

NODES = 5
RANKS = 3
#: 12 bytes of state each: 30 MB a rank.
PARAMETERS = 2_500_000
RAM_BUDGET_BYTES = 512 << 20
STEP_S = 0.3
SAMPLE_S = 5.0
#: All processes of all nodes run again, and all copies are there, within this after a fault.
RECOVERY_S = 90.0
#: A further attempt to start a job that could not be started at once.
STARTS_MAX = 10


class Soak:
    """The state of one run."""

    def __init__(self, cluster: Cluster, account: Account, folder: Path, draw: random.Random) -> None:
        self.cluster = cluster
        self.account = account
        self.draw = draw
        #: For what the job's thread draws: faults fall in the same order whatever the job does.
        self.draw_nodes = random.Random(account.seed)
        self.job = Job(cluster.local, account, PARAMETERS, folder)
        self.faults = Faults(cluster, draw)

    # --- the job

    def restart(self) -> None:
        """All ranks anew, on nodes that are drawn: a load by fresh processes wherever they are."""
        for _ in range(STARTS_MAX):
            nodes = self.draw_nodes.sample(self.cluster.names, RANKS)
            try:
                self.job.start(nodes, together=self.draw_nodes.random() < 0.5)
            except RankEndedError:
                continue
            return
        self.account.violated("hangs", f"the job could not be started {STARTS_MAX} times in a row")

    def train(self, seconds: float) -> None:
        """Step after step; a rank that has ended has the job started anew."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                self.job.begin_step()
                self.job.end_step()
            except RankEndedError:
                self.restart()
            time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))  # what a training step takes

    def train_until(self, done: Callable[[], bool], what: str, limit_s: float, kind: str) -> None:
        """Train until something holds; if it does not in time, that is a violation."""
        give_up_at = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > give_up_at:
                self.account.violated(kind, f"not within {limit_s:g} s: {what}")
                return
            self.train(0.5)

    def commits_go_on(self, after: str) -> None:
        """A step newer than the present ones is committed."""
        wanted = max(self.account.committed, self.job.step) + 1
        self.train_until(
            lambda: self.account.committed >= wanted,
            f"step {wanted} committed after {after}",
            2 * HANG_S,
            "hangs",
        )

    # --- the cluster

    def all_run(self) -> bool:
        """Every process of every node is there, and every node is UP."""
        for node in self.cluster.names:
            kinds = ("agent", "data", "registry") if node in VOTERS else ("agent", "data")
            if any(self.cluster.process(node, kind) is None for kind in kinds):
                return False
        return self._ask(lambda admin: all(n["state"] == "UP" for n in admin.nodes()["nodes"]))

    def all_copied(self) -> bool:
        """Every committed step has as many copies as it should have."""
        short = {"REPLICA_SHORT", "REPLICA_LOST", "CHECKPOINT_LOST", "NO_QUORUM"}
        return self._ask(lambda admin: not short & {code["code"] for code in admin.status()["codes"]})

    def _ask(self, question: Callable[[AdminClient], bool]) -> bool:
        for node in self.cluster.names:
            try:
                with AdminClient(self.cluster.local.address(node), timeout_s=5) as admin:
                    return question(admin)
            except FastCheckError:
                continue
        return False

    def recovered(self, after: str) -> None:
        """Wait, training, until nothing of a fault is left: the next one may cost a copy."""
        self.train_until(self.all_run, f"all processes back after {after}", RECOVERY_S, "never came back")
        self.train_until(self.all_copied, f"all copies there after {after}", RECOVERY_S, "never came back")
        self.commits_go_on(after)

    # --- what happens

    def happen(self) -> None:
        """One fault and what comes of it."""
        lot = self.draw.random()
        if lot < 0.12:
            name = self._kill_trainer()
        elif lot < 0.15:
            name = self._stop_trainer()
        elif lot < 0.3:
            name = self._lose_node()
        elif lot < 0.4:
            name = self._flip_replica()
        else:
            training = threading.Thread(target=self.train, args=(self.draw.uniform(0.5, 4),))
            training.start()
            name = self.faults.fall()
            training.join()
        self.account.faults[name] += 1
        self.recovered(name)

    def _kill_trainer(self) -> str:
        self.job.begin_step()
        time.sleep(self.draw.uniform(0, 0.3))  # at which moment of the save it dies is drawn
        self.draw.choice(self.job.ranks).kill()
        self.restart()
        return "kill trainer"

    def _stop_trainer(self) -> str:
        process = psutil.Process(self.draw.choice(self.job.ranks).process.pid)
        self.job.begin_step()
        time.sleep(self.draw.uniform(0, 0.3))  # as above
        process.suspend()
        time.sleep(self.draw.uniform(0.1, 3))  # how long it is stopped is drawn
        process.resume()
        self.job.end_step()
        return "SIGSTOP trainer"

    def _lose_node(self) -> str:
        node = self.draw.choice(self.cluster.names)
        if node in self.job.nodes:
            self.job.begin_step()
            self.job.stop()  # its trainer is gone with it, and then the launcher ends the others
        name = self.faults.lose_node(node)
        if not self.job.ranks:
            self.restart()
        return name

    def _flip_replica(self) -> str:
        free = [node for node in self.cluster.names if node not in self.job.nodes]
        name = self.faults.flip_replica(self.draw.choice(free))
        # Else it would be found by the next reader, or by the scrub, perhaps after the other copy was lost.
        self._ask(lambda admin: bool(admin.verify(JOB)) or True)
        return name

    def sample(self, minute: int) -> None:
        """What the processes take."""
        for node in self.cluster.names:
            for kind in ("agent", "data", "registry"):
                if (process := self.cluster.process(node, kind)) is not None:
                    self._measure(minute, kind, process)
        for rank in self.job.ranks:
            self._measure(minute, "trainer", psutil.Process(rank.process.pid))

    def _measure(self, minute: int, kind: str, process: psutil.Process) -> None:
        try:
            with process.oneshot():
                private = process.memory_info().rss - getattr(process.memory_info(), "shared", 0)
                self.account.sized(
                    minute,
                    kind,
                    private_mb=private / 1e6,
                    threads=process.num_threads(),
                    files=process.num_fds(),
                )
        except psutil.Error:
            return


def soak(seconds: float, seed: int, folder: Path, *, say: Callable[[str], None] = lambda _: None) -> Account:
    """Run for so long. The same seed draws the same faults; when they fall depends on the machine."""
    account = Account(seed)
    draw = random.Random(seed)
    say(f"seed {seed}, logs in {folder}")
    with LocalCluster(folder / "cluster") as local:
        cluster = Cluster(local, NODES, RAM_BUDGET_BYTES, {"codec": "always"})
        run = Soak(cluster, account, folder, draw)
        started = time.monotonic()
        sampled = 0.0
        try:
            run.restart()
            run.commits_go_on("the start")
            while (passed := time.monotonic() - started) < seconds:
                run.happen()
                if passed - sampled > SAMPLE_S:
                    sampled = passed
                    run.sample(int(passed // 60))
                say(
                    f"{passed:5.0f} s  {sum(account.faults.values())} faults, {account.commits} commits, "
                    f"{account.loads} loads, violations: { ({k: len(v) for k, v in account.violations.items()}) }"
                )
            run.restart()
        finally:
            run.job.stop()
            local.down()
            cluster.close()
    account.close()
    return account
