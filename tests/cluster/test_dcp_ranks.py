"""torch.distributed.checkpoint on four ranks, across meshes and world sizes, as PyTorch itself would judge it.

One cluster and one process group go through all cases of dcp_ranks.py; here each case is a test.
"""

from __future__ import annotations

import json

import pytest
from tests.cluster.dcp_ranks import CASES, WORLD
from tests.forks import Fork

from fastcheck.local import LocalCluster
from fastcheck.local.ports import find_free_ports

NODES = 3
#: All cases on four processes that share whatever cores there are.
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Per rank: what each case came to."""
    folder = tmp_path_factory.mktemp("dcp")
    with LocalCluster(folder / "cluster") as cluster:
        # Some ranks fail on purpose, and their step keeps the next one waiting for so long.
        cluster.up(NODES, ram_budget="512MiB", settings={"quarantine_s": 2.0, "keep_steps": 2})
        (port,) = find_free_ports(1)
        ranks = []
        for rank in range(WORLD):
            address = cluster.address(cluster.node_ids[rank % NODES])
            out = folder / f"rank-{rank}.json"
            with (folder / f"rank-{rank}.log").open("wb") as log:
                arguments = [str(each) for each in (rank, WORLD, port, address, out)]
                ranks.append(Fork(["-m", "tests.cluster.dcp_ranks", *arguments], stdout=log, stderr=log))
        try:
            for process in ranks:
                process.wait(TIMEOUT_S)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        yield (
            [
                json.loads(path.read_text()) if path.exists() else {}
                for path in (folder / f"rank-{rank}.json" for rank in range(WORLD))
            ],
            folder,
        )


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("case", CASES)
def test_dcp(outcome, case):
    ranks, folder = outcome
    for rank, found in enumerate(ranks):
        log = (folder / f"rank-{rank}.log").read_text()[-3000:]
        assert case in found, f"rank {rank} did not get there:\n{log}"
        assert not found[case], f"rank {rank}:\n{found[case]}\n{log}"
