"""A model saved in one layout goes into another one: by the Checkpointer wherever torch.distributed.checkpoint does.

The table is all pairs of layouts of up to four ranks. A few that stand for the others are in the gate; all of them are
a long run. Both ways go through the same daemons; what is found must be what was saved, bit for bit, and be trained on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cluster.layout_ranks import LAYOUTS, WORLD
from tests.forks import Fork

from fastcheck.local import LocalCluster
from fastcheck.local.ports import find_free_ports

NODES = 3
TIMEOUT_S = 240
LONG_S = 1500

#: Each is a way in which a mesh loses or gains a dimension, or a rank.
FEW = [
    "fsdp2xtp2:fsdp3",
    "fsdp2xtp2:fsdp2",
    "fsdp2xtp2:whole",
    "fsdp2xtp2:fsdp1xtp2",
    "fsdp2xtp2:fsdp4",
    "fsdp2xtp2:tp4",
    "fsdp3:fsdp2xtp2",
    "fsdp4:hsdp2x2",
    "hsdp2x2:fsdp3",
    "tp4:fsdp2",
    "hsdp1xfsdp2xtp2:tp2",
]
ALL = [":".join(pair) for pair in itertools.product(LAYOUTS, repeat=2)]


def outcome(folder: Path, pairs: Sequence[str], timeout_s: float) -> list[dict[str, dict[str, str]]]:
    """Per rank: what each pair came to."""
    with LocalCluster(folder / "cluster") as cluster:
        cluster.up(NODES, ram_budget="512MiB")
        (port,) = find_free_ports(1)
        ranks: list[Fork] = []
        try:
            for rank in range(WORLD):
                address = cluster.address(cluster.node_ids[rank % NODES])
                with (folder / f"rank-{rank}.log").open("wb") as log:
                    arguments = [str(rank), str(port), address, str(folder / f"rank-{rank}.json"), *pairs]
                    ranks.append(
                        Fork(["-m", "tests.cluster.layout_ranks", *arguments], stdout=log, stderr=log)
                    )
            for process in ranks:
                process.wait(timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    found = []
    for rank in range(WORLD):
        log_text = (folder / f"rank-{rank}.log").read_text()[-3000:]
        assert ranks[rank].returncode == 0, f"rank {rank}:\n{log_text}"
        found.append(json.loads((folder / f"rank-{rank}.json").read_text()))
    return found


def check(ranks: Sequence[dict[str, dict[str, str]]], pair: str) -> None:
    for rank, found in enumerate(ranks):
        for how, why in found[pair].items():
            assert not why, f"{how}, rank {rank}:\n{why}"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    return outcome(tmp_path_factory.mktemp("few"), FEW, TIMEOUT_S)


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("pair", FEW)
def test_a_model_goes_from_one_layout_into_another(few, pair):
    check(few, pair)


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    return outcome(tmp_path_factory.mktemp("all"), ALL, LONG_S)


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 60)
@pytest.mark.parametrize("pair", ALL)
def test_a_model_goes_from_any_layout_into_any_other(all_of_them, pair):
    check(all_of_them, pair)
