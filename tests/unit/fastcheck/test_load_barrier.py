"""Ranks agree on one step, and to fill all or none, whatever each of them sees and whoever fails or stays away."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from fastcheck import DaemonUnavailableError, FastCheckError, InvalidArgumentError, LoadFailedError
from fastcheck.load_barrier import Agreement, LoadBarrier, RankReport, decide, join_load, step_alone

numbers = itertools.count()


def loads(*ranks, ranks_s=20.0, load_s=20.0):
    """What each rank comes to: its step, or the error. A rank is (what it can load, what it meets before filling).

    None for a rank: it does not come.
    """
    store, name = dist.HashStore(), f"load-{next(numbers)}"

    def load(number):
        if ranks[number] is None:
            return None
        found, trouble = ranks[number]
        meeting = LoadBarrier(store, name, number, len(ranks), ranks_s=ranks_s, load_s=load_s)

        def loadable():
            if isinstance(found, Exception):
                raise found
            return found

        try:
            with meeting:
                step = meeting.step(loadable)
                if step is not None:
                    if trouble is not None:
                        raise trouble
                    meeting.fill()
                return step
        except (FastCheckError, ValueError, KeyError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(load, range(len(ranks))))


def can(*steps, provisional=False, trouble=None):
    return (list(steps), provisional), trouble


def test_all_ranks_get_the_newest_step_that_each_can_load():
    assert loads(can(1, 4, 5), can(4, 5, 6), can(3, 5)) == [5, 5, 5]
    assert loads(can(1, 2), can(1, 2, 3, provisional=True)) == [2, 2]
    assert loads(can(), can()) == [None, None]
    assert loads(can(*range(200)), can(*range(150, 199))) == [198, 198]


@pytest.mark.parametrize("provisional", [False, True])
def test_ranks_that_have_no_step_in_common_all_raise(provisional):
    for error in loads(can(1, provisional=provisional), can(2)):
        assert isinstance(error, LoadFailedError)
        assert "rank 0 1; rank 1 2" in str(error)
        assert ("registry does not answer" in str(error)) == provisional


@pytest.mark.parametrize("lost", [[0], [1], [2], [0, 2], [1, 2], [0, 1, 2]])
def test_a_rank_that_cannot_reach_its_daemon_raises_that_and_all_others_name_it(lost):
    away = DaemonUnavailableError("no daemon on this node")
    found = loads(*((away, None) if rank in lost else can(7) for rank in range(3)))
    for rank, error in enumerate(found):
        if rank in lost:
            assert error is away
        else:
            assert isinstance(error, LoadFailedError)
            assert f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} cannot load" in str(error)
            assert "no daemon on this node" in str(error)


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_fills_when_one_could_not_check_its_part(failing):
    trouble = ValueError("its state does not fit")
    found = loads(*(can(7, trouble=trouble if rank == failing else None) for rank in range(3)))
    assert found[failing] is trouble
    for error in found[:failing] + found[failing + 1 :]:
        assert isinstance(error, LoadFailedError)
        assert f"rank {failing} cannot load" in str(error)
        assert "its state does not fit" in str(error)


def test_a_rank_that_does_not_come_is_named_within_the_time():
    started = time.monotonic()
    first, missing, last = loads(can(7), None, can(7), ranks_s=0.5)
    assert missing is None
    assert time.monotonic() - started < 10
    for error in (first, last):
        assert isinstance(error, LoadFailedError)
        assert "rank 1 did not take part" in str(error)


def test_what_ranks_before_a_restart_said_is_not_believed():
    """torchrun may keep its store; here the first one is late, so the old call and answer are what the other finds."""
    store = dist.HashStore()

    def load(rank, step, wait_s=0.0):
        time.sleep(wait_s)
        with LoadBarrier(store, "again", rank, 2, ranks_s=20, load_s=20) as meeting:
            found = meeting.step(lambda: ([step], False))
            meeting.fill()
            return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(load, (0, 1), (3, 3))) == [3, 3]
        assert list(threads.map(load, (0, 1), (5, 5), (0.3, 0.0))) == [5, 5]
        assert list(threads.map(load, (0, 1), (6, 6), (0.0, 0.3))) == [6, 6]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_one_rank_never_came_to_does_not_keep_the_next_ones_apart(failing, monkeypatch):
    """It failed before it could say so: the others gave up, and all try again."""
    monkeypatch.setattr("fastcheck.load_barrier._ANSWER_S", 0.1)
    store = dist.HashStore()

    def load(rank, ranks_s):
        with LoadBarrier(store, "gpt", rank, 3, ranks_s=ranks_s, load_s=20) as meeting:
            found = meeting.step(lambda: ([3], False))
            meeting.fill()
            return found

    def alone(rank):
        with pytest.raises(LoadFailedError, match=f"rank {failing} did not"):
            load(rank, 0.3)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(alone, (rank for rank in range(3) if rank != failing)))
        for _ in range(2):
            assert list(threads.map(load, range(3), [20.0] * 3)) == [3, 3, 3]


def test_without_rank_0_nobody_decides(monkeypatch):
    monkeypatch.setattr("fastcheck.load_barrier._ANSWER_S", 0.1)
    nobody, error = loads(None, can(7), ranks_s=0.2)
    assert nobody is None
    assert "rank 0 did not hear this rank" in str(error)


def test_whatever_ends_a_rank_is_told():
    """Also what is no error of ours, and before it has said anything."""
    first, second = loads((KeyError("defect"), None), can(7))
    assert isinstance(first, KeyError)
    assert isinstance(second, LoadFailedError)
    assert "KeyError" in str(second)


def test_the_verdict_names_many_ranks_shortly():
    told = {rank: RankReport(why="DaemonUnavailableError: away") for rank in range(1000)}
    assert len(decide(told, 1001, 5).why) < 400
    assert decide({0: RankReport([3])}, 1, 5) == Agreement(3)


def test_without_torch_distributed_each_rank_is_alone():
    assert join_load("gpt", 0, 2, ranks_s=1, load_s=1) is None
    assert step_alone(([3, 7], False), 2) == 7
    assert step_alone(([], False), 2) is None
    with pytest.raises(InvalidArgumentError, match=r"step=.*3, 7"):
        step_alone(([3, 7], True), 2)
    assert issubclass(InvalidArgumentError, FastCheckError)
