"""Whose turn it is to be checked: on an invented clock."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.maintenance.scrub_schedule import ScrubItem, ScrubSchedule


def replica(
    name: str, *, step: int = 1, size: int = 100, verified: bool = True, digest: bytes = b"d"
) -> ScrubItem:
    return ScrubItem((name, step), step, digest, size, verified)


def turns(
    book: ScrubSchedule, held: list[ScrubItem], *, start: float, stop: float
) -> list[tuple[float, str]]:
    """Who was checked when, looking each second."""
    done = []
    now = start
    while now < stop:
        book.refresh(held, now)
        chosen = book.next(now)
        if chosen is None:
            now += 1.0
        else:
            book.checked(chosen, now)
            done.append((now, str(chosen.name[0])))
    return done


def test_what_was_taken_over_from_an_earlier_process_comes_first_and_the_newest_step_before_others() -> None:
    held = [
        replica("fresh", step=9),
        replica("old", step=3, verified=False),
        replica("new", step=7, verified=False),
    ]
    book = ScrubSchedule(1000.0)
    assert [name for _, name in turns(book, held, start=0.0, stop=1.0)] == ["new", "old"]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(100, 2000))
def test_everything_is_checked_again_within_the_period_and_not_much_more_often(
    sizes: list[int], period: int
) -> None:
    held = [replica(f"r{i}", size=size) for i, size in enumerate(sizes)]
    book = ScrubSchedule(float(period))
    done = turns(book, held, start=0.0, stop=3.0 * period)
    for each in held:
        times = [0.0, *(at for at, name in done if name == each.name[0])]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert gaps and max(gaps) <= period + 2 * len(held)
        assert len(gaps) <= 5


def test_the_reading_is_spread_over_the_period() -> None:
    held = [replica(f"r{i}") for i in range(8)]
    done = turns(ScrubSchedule(1000.0), held, start=0.0, stop=900.0)
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(done)]
    assert gaps and min(gaps) >= 99


def test_the_age_is_that_of_the_replica_that_waits_longest() -> None:
    book = ScrubSchedule(1000.0)
    assert book.age_s(0.0) is None
    first, second = replica("a"), replica("b", verified=False)
    book.refresh([first], 10.0)
    book.refresh([first, second], 30.0)
    assert book.age_s(50.0) == 40.0
    book.checked(first, 45.0)
    assert book.age_s(50.0) == 20.0
    book.checked(second, 50.0)
    assert book.age_s(50.0) == 5.0


def test_other_bytes_under_the_same_name_are_another_replica() -> None:
    book = ScrubSchedule(1000.0)
    book.refresh([replica("a", digest=b"1")], 0.0)
    book.refresh([replica("a", digest=b"2", verified=False)], 5.0)
    chosen = book.next(5.0)
    assert chosen is not None and chosen.digest == b"2"
