"""The checker itself: histories that are right in some order, and such that are in none."""

import dataclasses

import pytest
from tests.cluster.linearizability import Operation, check


def opened(session, start, end, client="a"):
    return Operation(kind="open", client=client, session=session, called_at=start, returned_at=end)


def commit(step, start, end, outcome="committed", session=1):
    when = {"called_at": start, "returned_at": end}
    return Operation(kind="commit", client=f"s{session}", step=step, session=session, outcome=outcome, **when)


def looked_up(step, start, end):
    return Operation(kind="lookup", client="reader", step=step, called_at=start, returned_at=end)


def unanswered(operation):
    return dataclasses.replace(operation, returned_at=float("inf"), outcome="")


FIRST = opened(1, 0, 1)


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([looked_up(0, 0, 1)], id="nothing yet"),
        pytest.param([FIRST, commit(5, 2, 3), looked_up(5, 4, 5)], id="one after the other"),
        pytest.param(
            [FIRST, commit(5, 2, 6), looked_up(0, 3, 4), looked_up(5, 4.5, 5)], id="in the middle of a commit"
        ),
        pytest.param([FIRST, commit(5, 2, 6), looked_up(5, 3, 4)], id="read before the commit has returned"),
        pytest.param([FIRST, commit(5, 2, 6), commit(6, 2, 6), looked_up(6, 7, 8)], id="two at once"),
        pytest.param([FIRST, commit(6, 2, 6), commit(5, 2, 6, "not newer")], id="the newer one first"),
        pytest.param([FIRST, unanswered(commit(5, 2, 3)), looked_up(0, 4, 5)], id="lost without an effect"),
        pytest.param(
            [FIRST, unanswered(commit(5, 2, 3)), looked_up(0, 4, 5), looked_up(5, 90, 91)], id="lost, late"
        ),
        pytest.param([FIRST, opened(2, 2, 3, "b"), commit(5, 4, 5, "fenced")], id="fenced"),
        pytest.param(
            [FIRST, opened(2, 2, 6, "b"), commit(5, 3, 4)], id="committed while the next one takes over"
        ),
        pytest.param([FIRST, opened(3, 2, 3, "b"), commit(5, 4, 5, session=3)], id="a number left out"),
        pytest.param(
            [FIRST, unanswered(opened(0, 2, 3, "b")), commit(5, 4, 5, "fenced")], id="fenced by a mute one"
        ),
    ],
)
def test_a_history_that_some_order_explains_is_linearizable(history):
    verdict = check(history)
    assert verdict.linearizable, str(verdict)


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([FIRST, commit(5, 2, 3), looked_up(0, 4, 5)], id="a committed step is not seen"),
        pytest.param(
            [FIRST, commit(5, 2, 6), looked_up(5, 3, 4), looked_up(0, 4.5, 5)], id="seen and gone again"
        ),
        pytest.param([FIRST, commit(5, 2, 3), commit(4, 4, 5)], id="an older step after a newer one"),
        pytest.param([FIRST, commit(5, 2, 3), commit(5, 4, 5)], id="the same step twice"),
        pytest.param(
            [FIRST, commit(5, 2, 3), commit(6, 4, 5), looked_up(5, 6, 7)], id="the newest goes back"
        ),
        pytest.param([FIRST, commit(5, 2, 3, "not newer")], id="refused without a reason"),
        pytest.param([FIRST, commit(5, 2, 3, "fenced")], id="fenced by nobody"),
        pytest.param(
            [FIRST, opened(2, 2, 3, "b"), commit(5, 4, 5)], id="committed by a process that was fenced"
        ),
        pytest.param([FIRST, opened(1, 2, 3, "b")], id="two processes in one session"),
        pytest.param(
            [FIRST, unanswered(commit(5, 4, 5)), looked_up(5, 2, 3)], id="seen before it was asked for"
        ),
        pytest.param(
            [FIRST, unanswered(commit(5, 2, 3)), looked_up(5, 4, 5), looked_up(0, 6, 7)], id="lost after all"
        ),
        pytest.param([commit(5, 2, 3)], id="committed without a session"),
    ],
)
def test_a_history_that_no_order_explains_is_not(history):
    verdict = check(history)
    assert not verdict.linearizable and verdict.stuck
    assert "not linearizable" in str(verdict)
