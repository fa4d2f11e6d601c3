"""Ranks agree on one step through torch.distributed, whatever each of them sees."""

import json
import subprocess
import sys

import pytest

from fastcheck import InvalidArgumentError
from fastcheck.agreeing import agree_on_step

RANK = """
import json, sys
import torch.distributed as dist
from fastcheck.agreeing import agree_on_step
from fastcheck.errors import DaemonUnavailableError, FastCheckError
rank, world, where, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + where, rank=rank, world_size=world)
for case in cases:
    def loadable():
        mine = case[rank]
        if mine is None:
            raise DaemonUnavailableError("away")
        return mine
    try:
        print(json.dumps(agree_on_step(loadable, rank, world)))
    except FastCheckError as error:
        print(json.dumps(type(error).__name__))
dist.destroy_process_group()
"""


def told(tmp_path, *cases):
    """What each rank of two comes to, case by case."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", str(tmp_path / "meet"), json.dumps(cases)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    return [tuple(json.loads(text) for text in each) for each in zip(*answers, strict=True)]


def test_all_ranks_get_the_newest_step_that_each_can_load(tmp_path):
    failed = "LoadFailedError"
    assert told(
        tmp_path,
        [([1, 4, 5], True), ([4, 5, 6], True)],
        [([1, 2], False), ([1, 2, 3], True)],
        [([], False), ([], False)],
        [([1], True), ([2], True)],
        [None, ([2], True)],
        [(list(range(200)), True), (list(range(150, 199)), True)],
    ) == [(5, 5), (2, 2), (None, None), (failed, failed), ("DaemonUnavailableError", failed), (198, 198)]


def test_ranks_that_cannot_speak_to_each_other_need_a_step_from_the_caller():
    with pytest.raises(InvalidArgumentError, match=r"step=.*3, 7"):
        agree_on_step(lambda: ([3, 7], True), 0, 2)


def test_with_a_registry_there_is_nothing_to_agree_on():
    assert agree_on_step(lambda: ([3, 7], False), 0, 2) == 7
    assert agree_on_step(lambda: ([], False), 0, 2) is None
