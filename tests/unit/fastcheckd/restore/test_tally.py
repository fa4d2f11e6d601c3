"""How far a load is."""

from fastcheckd.restore.tally import Tally


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_rate_is_that_of_late_and_holders_are_counted_once():
    clock = Clock()
    tally = Tally(clock)
    tally.begin(1000)
    assert tally.look().bytes_per_s == 0
    tally.local_bytes = 100
    for second in range(1, 20):
        clock.now = float(second)
        tally.came("a" if second % 2 else "b", 10 if second < 12 else 30)
        seen = tally.look()
    assert (seen.bytes_done, seen.bytes_total, seen.holders) == (100 + 11 * 10 + 8 * 30, 1000, 2)
    assert seen.bytes_per_s == 30


def test_a_step_that_turns_out_incomplete_does_not_count_for_the_next_one():
    clock = Clock()
    tally = Tally(clock)
    tally.begin(1000)
    tally.came("a", 400)
    tally.look()
    tally.begin(500)
    clock.now = 1.0
    seen = tally.look()
    assert (seen.bytes_done, seen.bytes_total, seen.bytes_per_s) == (0, 500, 0)
