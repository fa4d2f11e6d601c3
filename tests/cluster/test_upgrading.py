"""A cluster of this version becomes one of a newer version, node by node, under a job that saves; and how far back.

The procedure is that of docs/operating/upgrading.md, and the two builds are really two: see `tests/newer_build.py`.
"""

import contextlib
import json
import re
import subprocess
import time

import psutil
import pytest
import torch
from tests import newer_build
from tests.cluster import steered_trainers
from tests.cluster.harness import counters, run_module, until
from tests.cluster.steered_trainers import state_of
from tests.forks import Fork

import fastcheckd
from fastcheck import Checkpointer
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster, LocalClusterError
from fastcheck_proto.v1.registry_log_pb2 import RaftSnapshot
from fastcheckd.registry.model import SCHEMA
from fastcheckd.registry.raft.snapshots import CHECKSUM_BYTES

PRESENT, NEWER = fastcheckd.__version__, newer_build.VERSION
NODES = ["node-0", "node-1", "node-2"]
JOB = "gpt"
#: A node is back sooner than an SDK that did not find it looks again; its saves fail at once until then.
SDK_LOOKS_AGAIN_S = 2.0
#: What an operator waits for before the next node, with any severity.
WAIT_FOR = {"NO_QUORUM", "QUORUM_THIN", "NODE_DOWN", "NODE_SUSPECT", "REPLICA_SHORT"}


@pytest.fixture
def newer(tmp_path):
    return newer_build.make(tmp_path / "newer")


@pytest.fixture
def cluster(tmp_path):
    """Three nodes, all of them voters."""
    with LocalCluster(tmp_path / "cluster") as cluster:
        cluster.up(len(NODES), ram_budget="256MiB")
        yield cluster


class Job:
    """Trainers with this build's SDK, one on each node; and what they were told."""

    def __init__(self, cluster):
        self._process = Fork(
            ["-m", steered_trainers.__name__, JOB, *map(cluster.address, NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.step = 0
        self._saved_at = 0.0
        self.committed = []
        self.late = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    def _ask(self, what, step):
        self._process.stdin.write(json.dumps({what: step}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def save(self):
        """All ranks save the next step; nobody waits for its end."""
        self.step += 1
        self._ask("save", self.step)
        self._saved_at = time.monotonic()

    def settle(self, step):
        """Wait for a step's end, which may be that a later one was committed in its place."""
        errors = self._ask("end_of", step)["errors"]
        (self.late if errors else self.committed).append(step)
        return errors

    def commit(self):
        """The next step is saved and committed."""
        self.save()
        assert self.settle(self.step) == {}


def stop(cluster, node):
    psutil.Process(cluster.pids(node)[0]).terminate()
    until(lambda: not cluster.pids(node), f"{node} to end")


def versions(cluster):
    found = {}
    for node in NODES:
        with AdminClient(cluster.address(node), timeout_s=5) as admin:
            found[node] = admin.describe()["version"]
    return found


def looked_again():
    """Wait until an SDK whose daemon is back has found it: it looks every so often, saving or not."""
    since = time.monotonic()
    until(lambda: time.monotonic() - since > SDK_LOOKS_AGAIN_S, "the SDK to look for its daemon again")


def replaced(cluster, job, node, start, *, while_away):
    """Another build takes a node's place. The step that falls into it may be late; the next one may not."""

    def well():
        with AdminClient(cluster.address(node), timeout_s=5) as admin:
            return not WAIT_FOR & {code["code"] for code in admin.status()["codes"]}

    if not while_away:
        job.save()
    stop(cluster, node)
    if while_away:
        job.save()
    start(node)
    fell_into_it = job.step
    # Its copies count again, and its voter: only then comes the next node.
    until(well, f"the cluster to be well again with {node}")
    looked_again()
    job.commit()
    job.settle(fell_into_it)
    assert counters(cluster, node)["manifests_adopted"] > 0, "what it held is there, whichever build wrote it"
    with Checkpointer(JOB, rank=0, world_size=len(NODES), address=cluster.address(node)) as ckpt:
        assert ckpt.steps()[-1] == job.step == max(job.committed)


def kept_schema(cluster, node):
    """The schema of the registry's state in a voter's snapshot; 0: there is no snapshot."""
    snapshot = cluster.dir / node / "state" / "registry" / "snapshot"
    if not snapshot.exists():
        return 0
    return RaftSnapshot.FromString(snapshot.read_bytes()[CHECKSUM_BYTES:]).state.schema


@pytest.mark.timeout(400)  # eleven starts of a daemon, and as many of a command
def test_nodes_are_upgraded_in_turn_under_a_job_and_may_go_back_until_the_last_voter_is(newer, cluster):
    def upgraded(node):
        done = newer.run("fastcheck", "local", "start", node, "--dir", cluster.dir)
        assert done.returncode == 0, done.stderr

    with Job(cluster) as job:
        job.commit()
        job.commit()
        assert set(versions(cluster).values()) == {PRESENT} != {NEWER}
        replaced(cluster, job, "node-0", upgraded, while_away=False)
        assert versions(cluster) == {"node-0": NEWER, "node-1": PRESENT, "node-2": PRESENT}
        # Either build's commands are answered by the other's nodes, about all of them.
        for node, ask in (("node-0", run_module), ("node-1", newer.run)):
            done = ask("fastcheck", "checkpoints", JOB, "-o", "json", "--address", cluster.address(node))
            assert job.step in [c["step"] for c in json.loads(done.stdout)["checkpoints"]], done.stderr
        # Back, as if something were wrong with it, and forward again.
        replaced(cluster, job, "node-0", cluster.start, while_away=True)
        assert set(versions(cluster).values()) == {PRESENT}
        for node, while_away in zip(NODES, (True, False, True), strict=True):
            replaced(cluster, job, node, upgraded, while_away=while_away)
        assert set(versions(cluster).values()) == {NEWER}
        assert len(job.late) <= 5, "one step at most for each replacement"
        # From the last voter on the state is in the newer schema, and each voter has that on disk.
        until(
            lambda: {kept_schema(cluster, node) for node in NODES} == {newer_build.NEWER_SCHEMA},
            "all voters to have kept the schema",
        )
        # So no voter goes back: it says so and ends, instead of having a state of its own. Its agent may have
        # registered at another voter before.
        stop(cluster, "node-2")
        with contextlib.suppress(LocalClusterError):
            cluster.start("node-2")
        until(lambda: not cluster.pids("node-2"), "the voter that went back to end")
        said = cluster.log_file("node-2").read_text()
        assert re.search(rf"has schema {SCHEMA + 1}, this version reads \d+ to {SCHEMA}", said)
        upgraded("node-2")
        looked_again()
        job.commit()
    # The trainers come last: the same steps, bit for bit.
    newest = job.step
    for rank, node in enumerate(NODES):
        with Checkpointer(JOB, rank=rank, world_size=len(NODES), address=cluster.address(node)) as ckpt:
            for step in ckpt.steps():
                state, wanted = state_of(0, rank), state_of(step, rank)
                assert ckpt.load(state, step=step) == step == state["step"]
                for name, tensor in wanted["model"].items():
                    assert torch.equal(state["model"][name], tensor), (rank, step, name)
            assert ckpt.steps()[-1] == newest
