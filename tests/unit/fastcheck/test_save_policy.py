"""When a save is due: by steps, by time, for one rank and for several."""

import os
import subprocess
import threading

import pytest
from tests.forks import Fork

import fastcheck
from fastcheck.advice import Every


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(policy, clock, step_s, steps, first=1):
    """Steps at which it is due, with a clock that goes on by `step_s` per step."""
    found = []
    for step in range(first, first + steps):
        clock.now += step_s
        if policy(step):
            found.append(step)
    return found


def test_by_steps_it_is_due_at_multiples_wherever_a_run_begins():
    assert [s for s in range(1, 10) if fastcheck.every()(s)] == list(range(1, 10))
    assert [s for s in range(1, 10) if fastcheck.every(3)(s)] == [3, 6, 9]
    assert [s for s in range(5, 10) if fastcheck.every(step=3).due(s)] == [6, 9]


def test_by_time_it_is_due_when_so_much_has_passed():
    clock = Clock()
    policy = Every(None, 10.0, clock=clock, agree=lambda said: said)
    assert run(policy, clock, 1.0, 45) == [10, 20, 30, 40]


def test_whichever_comes_first_and_a_save_by_steps_begins_the_time_anew():
    clock = Clock()
    policy = Every(8, 5.0, clock=clock, agree=lambda said: said)
    assert run(policy, clock, 1.0, 24) == [5, 8, 13, 16, 21, 24]


def test_asked_twice_it_says_the_same():
    clock = Clock()
    policy = Every(None, 2.0, clock=clock, agree=lambda said: said)
    clock.now += 3.0
    assert policy(7) and policy(7)
    assert not policy(8)


def test_rank_0_is_asked_a_few_times_per_save_and_steps_that_become_slower_do_not_make_it_much_later():
    clock, asked = Clock(), []

    def agree(said):
        asked.append(said)
        return said

    policy = Every(None, 100.0, clock=clock, agree=agree)
    due = run(policy, clock, 0.1, 3005)
    assert due == pytest.approx([1000, 2000, 3000], abs=5)
    assert len(asked) < 15 * len(due)
    # Now each step takes three times as long as what rank 0 reckoned with.
    begin = clock.now
    late = run(policy, clock, 0.3, 1500, first=3006)
    assert (late[0] - 3001) * 0.3 <= 100.0 * 1.5 + 1
    assert clock.now - begin == pytest.approx(450.0)


def test_ranks_whose_clocks_differ_decide_alike_and_ask_at_the_same_steps():
    """Rank 0's word reaches all; a rank that asked at another step would wait for ever, here: time out."""
    barrier = threading.Barrier(3, timeout=60)
    told, found, errors = [None], {}, []

    def agree_for(rank):
        def agree(said):
            barrier.wait()
            if rank == 0:
                told[0] = said
            barrier.wait()
            heard = told[0]
            barrier.wait()
            return heard

        return agree

    def train(rank):
        try:
            clock = Clock()
            policy = Every(50, 7.0, clock=clock, agree=agree_for(rank))
            found[rank] = run(policy, clock, 0.3 + 0.2 * rank, 300)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(20)
    assert not errors
    assert found[0] == found[1] == found[2]
    assert {50, 100, 150} < set(found[0]) and len(found[0]) > 10


def test_several_ranks_without_torch_distributed_cannot_agree_on_a_time(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fastcheck.every(2)(4)  # by steps there is nothing to agree on
    with pytest.raises(fastcheck.InvalidArgumentError, match=r"initialise torch\.distributed"):
        fastcheck.every(seconds=1.0)(1)


def test_ranks_agree_through_torch_distributed(tmp_path):
    code = """
import sys, time
import torch.distributed as dist
import fastcheck
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
policy = fastcheck.every(seconds=0.05 if rank == 0 else 1000.0)
due = []
for step in range(1, 100):
    deadline = time.monotonic() + (0.004 if rank == 0 else 0.002)
    while time.monotonic() < deadline:
        pass
    if policy(step):
        due.append(step)
print(due)
dist.destroy_process_group()
"""
    ranks = [
        Fork(
            ["-c", code, rank, tmp_path / "store"],
            env={**os.environ, "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    told = [rank.stdout.read() for rank in ranks]
    assert told[0] == told[1]
    assert len(told[0].split(",")) >= 2


@pytest.mark.parametrize(
    "wrong", [{"step": 0}, {"step": -3}, {"seconds": 0}, {"seconds": float("nan")}, {"step": 1.5}]
)
def test_intervals_that_are_none_are_refused(wrong):
    with pytest.raises(fastcheck.InvalidArgumentError):
        fastcheck.every(**wrong)
