"""The guides' examples for plain PyTorch, FSDP2 and torchrun: killed, resumed, and left without a daemon."""

import os
import re
import signal
from collections.abc import Iterator

import pytest
from tests.cluster.guides import EXAMPLES, Example, is_killed_and_resumed, newest_commit
from tests.cluster.harness import until

from fastcheck.local import LocalCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[LocalCluster]:
    """One for all examples: each is a job of its own, and the node that one kills is started again."""
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.up(2, tolerate=1, ram_budget="256MiB")
        yield cluster


def test_a_plain_loop_resumes_with_the_same_numbers_and_batches(cluster, tmp_path):
    is_killed_and_resumed(cluster, tmp_path, "plain.py", "plain", kill_at=20, committed=16)


def test_fsdp2_under_torchrun_goes_on_from_the_step_that_all_ranks_have(cluster, tmp_path):
    def torchrun(log: str, **environment: str) -> Example:
        options = ["--nproc-per-node", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command = ["-m", "torch.distributed.run", *options, "--rdzv-id", "gpt", EXAMPLES / "fsdp2.py"]
        return Example(cluster, tmp_path / log, *command, **environment)

    runs = [torchrun("whole.log", FASTCHECK_DISABLE="1"), torchrun("first.log")]
    whole, first = runs
    try:
        first.read_until(lambda: 14 in first.losses)
        pids = [int(m[1]) for line in first.lines if (m := re.match(r"rank \d pid (\d+) begins", line))]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)  # the other one waits for it in its next collective
        until(lambda: newest_commit(cluster, "gpt") >= 10, "a commit from step 10 on")
        for pid in (first.process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        whole.finish()
        runs.append(torchrun("second.log"))
        second = runs[-1]
        second.finish()
        assert whole.begins == ["0", "0"] and max(whole.losses) == 30
        (resumed_at,) = set(second.begins)
        assert int(resumed_at) >= 10 and len(second.begins) == 2
        expected = {step: loss for step, loss in whole.losses.items() if step > int(resumed_at)}
        assert second.losses == expected
    finally:
        for each in runs:
            each.stop()
