"""How far a copy is said to be: never further than it is, whoever copies what in which order."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck import copying
from fastcheck.copying import Copier, Moves
from fastcheck.front import Front
from fastcheck.lazy import LazyCopy
from fastcheck.segments import anonymous
from fastcheck.state.flatten import flatten
from fastcheck.state.layouts import Layouts

DEADLINE_S = 10.0


class Copying:
    """Threads that copy runs one step at a time, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: frozenset[int] = frozenset()) -> None:
        self.begun: list[int] = []
        self.done: set[int] = set()
        self._fails = fails
        self._may_end: dict[int, threading.Event] = {}
        self._changed = threading.Condition()
        monkeypatch.setattr(copying, "move_bytes", self._move)
        monkeypatch.setattr(copying, "populate", lambda *_: True)

    def _move(self, into: int, _source: int, _size: int) -> None:
        with self._changed:
            event = self._may_end.setdefault(into, threading.Event())
            self.begun.append(into)
            self._changed.notify_all()
        assert event.wait(DEADLINE_S)
        if into in self._fails:
            raise RuntimeError("the copy breaks off here")
        with self._changed:
            self.done.add(into)
            self._changed.notify_all()

    def until_begun(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, DEADLINE_S)

    def until_done(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count, DEADLINE_S)

    def end(self, into: int) -> None:
        self._may_end[into].set()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    threads=st.integers(1, 4),
    data=st.data(),
    cold=st.booleans(),
)
def test_what_is_said_to_be_there_is_there_in_whatever_order_runs_end(sizes, threads, data, cold):
    with pytest.MonkeyPatch.context() as patch:
        steps = Copying(patch)
        starts = [1000 + sum(sizes[:i]) for i in range(len(sizes))]
        runs = [(start, 1, size) for start, size in zip(starts, sizes, strict=True)]
        # A block made present reaches beyond the run that it stands before, as in a segment never used.
        blocks = [(start + 7, 0, 5) for start in starts]
        order = [move for pair in zip(blocks, runs, strict=True) for move in pair] if cold else runs
        moves = Moves(order)
        assert moves.low() == 1000
        workers = [threading.Thread(target=moves.work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for ended in range(len(runs)):
            steps.until_begun(min(ended + threads, len(runs)))
            low = moves.low()
            left = [start for start in starts if start not in steps.done]
            # Runs are begun from the front, so no more than those under way may be missing behind it.
            assert low is not None and low <= left[0]
            steps.end(data.draw(st.sampled_from(sorted(set(steps.begun) - steps.done))))
            steps.until_done(ended + 1)
        for worker in workers:
            worker.join(DEADLINE_S)
        assert moves.low() is None


def test_it_says_how_far_it_is_while_it_goes_on(monkeypatch):
    steps = Copying(monkeypatch)
    moves = Moves([(100, 1, 10), (110, 1, 10), (120, 1, 10)])
    worker = threading.Thread(target=moves.work)
    worker.start()
    for at in (100, 110, 120):
        steps.until_begun(steps.begun.index(at) + 1 if at in steps.begun else len(steps.begun) + 1)
        assert moves.low() == at
        steps.end(at)
    worker.join(DEADLINE_S)
    assert moves.low() is None


def test_a_copy_that_broke_off_says_nothing_more(monkeypatch):
    steps = Copying(monkeypatch, fails=frozenset({110}))
    moves = Moves([(100, 1, 10), (110, 1, 10), (120, 1, 10)])
    failed: list[BaseException] = []

    def work() -> None:
        try:
            moves.work()
        except RuntimeError as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    for count, at in enumerate((100, 110), start=1):
        steps.until_begun(count)
        steps.end(at)
    worker.join(DEADLINE_S)
    assert failed and moves.low() == 0


def test_a_copy_that_is_called_off_says_nothing_more():
    moves = Moves([(100, 1, 10)])
    moves.cancel()
    assert moves.low() == 0


def test_a_state_is_there_part_by_part():
    front = Front(100)
    assert front.reach() == 0
    front.wait_for("far", 40)
    front.wait_for("header", 90)
    assert front.reach() == 0
    front.end("all")
    assert front.reach() == 40
    front.begin("near", lambda: 30)
    assert front.reach() == 30
    front.end("far")
    front.begin("near", lambda: None)
    assert front.reach() == 90
    front.end("header")
    assert front.reach() == 100


def test_the_copy_of_a_state_is_told_piece_by_piece_and_what_is_told_is_final(monkeypatch):
    monkeypatch.setattr(copying, "_PIECE_BYTES", 1000)
    weight = torch.nn.Parameter(torch.randn(40, 50))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.randn(40, 50)
    optimizer.step()
    state = {"w": weight, "optimizer": optimizer, "grid": torch.randn(30, 20).t(), "text": "x" * 100}
    flat = flatten(state, Layouts(None), lazy=True)
    assert any(piece.later for piece in flat.pieces) and flat.watched
    wanted = anonymous(flat.state_bytes)
    Copier(1).copy(
        flat.__class__(**{**flat.__dict__, "pieces": tuple(p._replace(later=False) for p in flat.pieces)}),
        wanted.tensor,
    )
    segment = anonymous(flat.state_bytes)
    segment.tensor.fill_(255)
    front = Front(flat.state_bytes)
    seen: list[int] = []
    real = copying.move_bytes

    def move(into: int, source: int, size: int) -> None:
        seen.append(front.reach())
        assert segment.tensor[: seen[-1]].equal(wanted.tensor[: seen[-1]])
        real(into, source, size)

    monkeypatch.setattr(copying, "move_bytes", move)
    copier = Copier(1)
    copier.copy(flat, segment.tensor, front=front)
    first_late = min(piece.offset for piece in flat.pieces if piece.later)
    assert front.reach() <= first_late
    later = LazyCopy(flat, segment, copier, copier._gpu, front)
    later.run()
    assert front.reach() == flat.state_bytes
    assert segment.tensor[: flat.state_bytes].equal(wanted.tensor[: flat.state_bytes])
    assert seen == sorted(seen) and len(set(seen)) > 3
