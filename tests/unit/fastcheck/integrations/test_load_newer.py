"""Memory or disk, whichever is newer: one decision for all ranks, and none of them waits for one that raised."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.unit.fastcheck.fake_daemon import FakeDaemon

from fastcheck import (
    Checkpointer,
    DaemonUnavailableError,
    FastCheckError,
    LoadFailedError,
    OutOfMemoryError,
    RegistryUnavailableError,
    StateMismatchError,
)
from fastcheck.integrations import disk_fallback
from fastcheck.integrations.disk_fallback import PlainState, load_newer

OUT_OF_REACH = [
    DaemonUnavailableError("no daemon"),
    RegistryUnavailableError("no leader"),
    LoadFailedError("every copy is gone"),
    OutOfMemoryError("no room"),
]


class Rank:
    """A Checkpointer, as far as it is asked: its load comes to a step, None or an error."""

    def __init__(self, outcome, world_size):
        self.outcome, self.world_size = outcome, world_size

    def load(self, state):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def decide(monkeypatch):
    """What each rank comes to, its step or its error. A rank is (what its load comes to, the newest on its disk)."""

    def ranks(*ranks):
        everybody, told, me = threading.Barrier(len(ranks)), {}, threading.local()

        def from_all(numbers, world_size):
            assert world_size == len(ranks)
            told[me.rank] = list(numbers)
            everybody.wait(timeout=60)  # a rank that does not come breaks it, where a collective would hang
            return [told[rank] for rank in range(world_size)]

        def one(number):
            me.rank = number
            try:
                return load_newer(Rank(ranks[number][0], len(ranks)), {}, ranks[number][1])
            except (FastCheckError, threading.BrokenBarrierError) as error:
                return error

        monkeypatch.setattr(disk_fallback, "from_all", from_all)
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(one, range(len(ranks))))

    return ranks


def test_the_newer_counts_on_all_ranks_and_memory_of_two_as_new(decide):
    assert decide((7, 5), (7, 5)) == [7, 7]
    assert decide((7, 7), (7, 7)) == [7, 7]
    assert decide((7, None), (7, None)) == [7, 7]
    assert decide((7, 8), (7, 8)) == [None, None]
    assert decide((None, 8), (None, 8)) == [None, None]
    assert decide((None, None), (None, None)) == [None, None]
    assert decide((0, None), (0, None)) == [0, 0], "a step 0 is a step"


def test_a_disk_that_only_one_rank_sees_counts_for_all(decide):
    """As where rank 0 alone wrote it: better an older step than two."""
    assert decide((7, 9), (7, None)) == [None, None]
    assert decide((7, None), (7, 6), (7, None)) == [7, 7, 7]


@pytest.mark.parametrize("error", OUT_OF_REACH, ids=lambda error: type(error).__name__)
def test_memory_out_of_reach_of_one_rank_is_not_used_by_any_and_each_says_so(decide, error, caplog):
    assert decide((error, 5), (7, 5), (7, None)) == [None, None, None]
    assert str(error) in caplog.text
    assert caplog.text.count("the newest checkpoint on disk counts") == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_state_does_not_fit_raises_and_so_do_all_others(decide, failing):
    """It must not fall back to disk on some: and it must not stay away from what the others decide together."""
    mismatch = StateMismatchError(["state['w'] is not in the checkpoint"])
    told = LoadFailedError("rank cannot load: StateMismatchError")  # by the meeting
    outcomes = [(told, 5), (told, 5), (7, 5)]
    outcomes[failing] = (mismatch, 5)
    found = decide(*outcomes)
    assert found[failing] is mismatch
    assert found[1 - failing] is told
    assert isinstance(found[2], LoadFailedError) and f"ranks [{failing}]" in str(found[2])


def test_one_rank_with_a_daemon_and_then_without_it(tmp_path, caplog):
    """The same with a real load: what it fills, and what it says when nobody is there."""
    state, loaded = {"model": PlainState({"w": torch.arange(5)})}, {"model": PlainState()}
    with FakeDaemon(tmp_path) as daemon, Checkpointer("gpt", address=daemon.address) as ckpt:
        assert load_newer(ckpt, loaded, None) is None and not caplog.text
        ckpt.save(7, state).result(timeout=60)
        assert load_newer(ckpt, loaded, 8) is None and not caplog.text
        assert load_newer(ckpt, loaded, 7) == 7
        assert torch.equal(loaded["model"].value["w"], torch.arange(5))
        with pytest.raises(StateMismatchError):
            load_newer(ckpt, {"other": PlainState()}, 5)
    with Checkpointer("gpt", address=f"unix://{tmp_path}/nobody.sock", timeout_s=0.1) as ckpt:
        assert load_newer(ckpt, loaded, 5) is None
    assert "the newest checkpoint on disk counts" in caplog.text
