"""A Lightning fit under DDP, two processes: both are killed, resume from memory, and go on with the same numbers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastcheck.local import LocalCluster
from fastcheck.local.ports import find_free_ports

WORLD = 2
KILL_AT = 11
STEPS = 20
#: Of each of the three runs; most of it is importing Lightning twice, beside other tests.
RUN_S = 240


def run(cluster: LocalCluster, folder: Path, kill_at: int = 0, **environment: str) -> list[dict[int, str]]:
    """Both ranks to their end; per rank: step → loss, bit for bit."""
    (port,) = find_free_ports(1)
    ranks, outputs = [], []
    try:
        for rank in range(WORLD):
            outputs.append(folder / f"{len(list(folder.iterdir()))}.log")
            with outputs[-1].open("w") as log:
                shared = {
                    "WORLD_SIZE": WORLD,
                    "LOCAL_WORLD_SIZE": WORLD,
                    "GROUP_RANK": 0,
                    "MASTER_PORT": port,
                }
                own = {"RANK": rank, "LOCAL_RANK": rank, **shared}
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.cluster.lightning_rank", str(kill_at)],
                        env={
                            **os.environ,
                            **{name: str(value) for name, value in own.items()},
                            "MASTER_ADDR": "127.0.0.1",
                            "TORCHELASTIC_RUN_ID": "ddp",  # how Lightning knows that torchrun started it
                            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                            "FASTCHECK_ADDRESS": cluster.address(f"node-{rank}"),
                            "OMP_NUM_THREADS": "1",
                            "CUDA_VISIBLE_DEVICES": "",
                            **environment,
                        },
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process, output in zip(ranks, outputs, strict=True):
            wanted = -signal.SIGKILL if kill_at else 0
            assert process.wait(RUN_S) == wanted, output.read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait(30)
    lines = [re.findall(r"^step (\d+) loss (\S+)$", output.read_text(), re.MULTILINE) for output in outputs]
    return [{int(step): loss for step, loss in found} for found in lines]


@pytest.mark.timeout(4 * RUN_S)
def test_every_rank_goes_on_with_its_own_numbers(tmp_path):
    (tmp_path / "logs").mkdir()
    with LocalCluster(tmp_path / "cluster") as cluster:
        cluster.up(2, tolerate=1, ram_budget="256MiB")
        whole = run(cluster, tmp_path / "logs", FASTCHECK_DISABLE="1")
        first = run(cluster, tmp_path / "logs", KILL_AT)
        second = run(cluster, tmp_path / "logs")
    assert whole[0] != whole[1]
    for rank in range(WORLD):
        assert list(whole[rank]) == list(range(1, STEPS + 1))
        assert first[rank] == {step: whole[rank][step] for step in range(1, KILL_AT + 1)}
        begun = min(second[rank])
        assert KILL_AT - 3 < begun <= KILL_AT + 1
        assert second[rank] == {step: whole[rank][step] for step in range(begun, STEPS + 1)}
