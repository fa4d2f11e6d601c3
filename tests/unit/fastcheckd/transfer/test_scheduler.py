"""Chunks shared among readers that are fast, slow, silent, wrong or gone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheckd.chunks import ChunkTable
from fastcheckd.transfer.scheduler import BAD_CHUNKS_MAX, TRIES_MAX, YIELD_S_MAX, Scheduler, WantedChunks

MIB = 1 << 20
PLENTY = 1 << 40
#: A source that says nothing for so long is left.
SILENT_S = 30.0


def scheduler_of(chunks: int, size: int = MIB, shards: int = 1) -> Scheduler:
    scheduler = Scheduler(range(shards))
    for shard in range(shards):
        assert scheduler.describe(shard, ChunkTable.uniform(chunks * size, size))
    return scheduler


@dataclass
class Reading:
    """One reader of a simulated load: a source with a rate, which may stop, end, or send bad chunks."""

    source: str
    shard: int
    rate: float
    stops_at: float = float("inf")
    ends_at: float = float("inf")
    bad: frozenset[int] = frozenset()
    number: int = -1
    queue: list[int] = field(default_factory=list)
    in_place: bool = False
    left_bytes: float = 0.0
    gone: bool = False
    received: list[int] = field(default_factory=list)


def simulate(
    scheduler: Scheduler, readings: list[Reading], sizes: dict[int, list[int]], until_s: float = 1000.0
):
    """Play a load in small steps of time; when it ended, and what was got by whom.

    As in a load, sources that were ended for being slow are asked once more when the others are through.
    """
    got: dict[tuple[int, int], str] = {}
    now, tick = 0.0, 0.01
    for reading in readings:
        reading.number = scheduler.join(reading.shard, reading.source, now)
    by_number = {reading.number: reading for reading in readings}
    slow: list[Reading] = []

    def leave(reading: Reading) -> None:
        scheduler.leave(reading.number)
        reading.gone = True

    def arrive(reading: Reading, chunk: int) -> None:
        reading.received.append(chunk)
        if chunk in reading.bad:
            if not scheduler.came_bad(reading.number, chunk, now):
                leave(reading)
        elif scheduler.got(reading.number, chunk, now):
            assert reading.in_place
            assert (reading.shard, chunk) not in got, "got twice"
            got[reading.shard, chunk] = reading.source
        else:
            assert not reading.in_place

    def receive(reading: Reading) -> None:
        budget = 0.0 if reading.stops_at <= now else reading.rate * tick
        while reading.queue and budget > 0 and not reading.gone:
            if not reading.left_bytes:
                reading.left_bytes = sizes[reading.shard][reading.queue[0]]
                reading.in_place = scheduler.wanted(reading.number, reading.queue[0])
            moved = min(budget, reading.left_bytes)
            budget -= moved
            reading.left_bytes -= moved
            if not reading.left_bytes:
                arrive(reading, reading.queue.pop(0))

    while now < until_s and not all(scheduler.finished(shard) for shard in sizes):
        for reading in [
            r for r in slow if not scheduler.is_read(r.shard) and not scheduler.finished(r.shard)
        ]:
            slow.remove(reading)
            reading.number = scheduler.join(reading.shard, reading.source, now)
            by_number[reading.number] = reading
            reading.gone, reading.queue, reading.left_bytes = False, [], 0.0
        if all(reading.gone for reading in readings):
            break
        for reading in readings:
            if reading.gone:
                continue
            if now >= reading.ends_at:
                leave(reading)
                continue
            receive(reading)
            if reading.gone:
                continue
            if reading.queue and reading.stops_at <= now:
                if now > reading.stops_at + SILENT_S:
                    leave(reading)
                continue  # its thread is inside a read
            turn = scheduler.turn(reading.number, now, PLENTY)
            assert len(set(turn.ask)) == len(turn.ask)
            reading.queue += turn.ask
            if turn.end is not None:
                slow.append(by_number[turn.end])
                leave(slow[-1])
            if turn.over:
                leave(reading)
        now += tick
    return now, got


def test_whoever_is_fast_takes_more():
    scheduler = scheduler_of(200)
    readings = [Reading("fast", 0, 90e6), Reading("slow", 0, 10e6)]
    took_s, got = simulate(scheduler, readings, {0: [MIB] * 200})
    assert len(got) == 200
    fast = sum(source == "fast" for source in got.values())
    assert 165 <= fast <= 192
    assert took_s < 1.25 * 200 * MIB / 100e6 + 0.3


def test_what_a_silent_one_was_asked_for_is_taken_over():
    scheduler = scheduler_of(50)
    readings = [Reading("good", 0, 50e6), Reading("silent", 0, 50e6, stops_at=0.3)]
    took_s, got = simulate(scheduler, readings, {0: [MIB] * 50})
    assert len(got) == 50
    assert took_s < 3.0
    assert readings[1].gone, "its connection was ended, or two would have written to one place"
    assert scheduler.was_too_slow("silent", 0)
    assert not scheduler.was_too_slow("good", 0)


def test_what_one_has_left_is_brought_by_others_and_what_came_stays():
    scheduler = scheduler_of(60)
    readings = [Reading("stays", 0, 20e6), Reading("dies", 0, 20e6, ends_at=0.5)]
    _, got = simulate(scheduler, readings, {0: [MIB] * 60})
    assert len(got) == 60
    assert sum(source == "dies" for source in got.values()) >= 3
    assert not set(readings[0].received) & {c for (_, c), s in got.items() if s == "dies"}


def test_a_bad_chunk_comes_from_elsewhere_and_the_rest_still_from_there():
    scheduler = scheduler_of(40)
    readings = [Reading("rotten", 0, 30e6, bad=frozenset({0, 1, 2})), Reading("good", 0, 30e6)]
    _, got = simulate(scheduler, readings, {0: [MIB] * 40})
    assert len(got) == 40
    assert sum(source == "rotten" for source in got.values()) >= 10
    assert scheduler.bad_chunks("rotten", 0) <= 3


def test_the_only_source_is_asked_once_more_for_a_bad_chunk_and_then_given_up():
    scheduler = scheduler_of(5)
    reading = Reading("only", 0, 30e6, bad=frozenset({2}))
    _, got = simulate(scheduler, [reading], {0: [MIB] * 5})
    assert sorted(chunk for _, chunk in got) == [0, 1, 3, 4]
    assert reading.received.count(2) == TRIES_MAX
    assert reading.gone


def test_a_source_of_nothing_but_bad_chunks_is_given_up():
    scheduler = scheduler_of(100)
    readings = [Reading("rotten", 0, 30e6, bad=frozenset(range(100))), Reading("good", 0, 30e6)]
    _, got = simulate(scheduler, readings, {0: [MIB] * 100})
    assert len(got) == 100
    assert scheduler.bad_chunks("rotten", 0) == BAD_CHUNKS_MAX


def test_a_source_first_gives_what_only_it_has():
    scheduler = scheduler_of(50, shards=2)
    sizes = {0: [MIB] * 50, 1: [MIB] * 50}
    # The source's link is shared by its two connections; each has half of it while both are at work.
    readings = [Reading("both", 0, 25e6), Reading("both", 1, 25e6), Reading("one", 1, 25e6)]
    _, got = simulate(scheduler, readings, sizes)
    assert len(got) == 100
    from_both = sum(source == "both" for (shard, _), source in got.items() if shard == 1)
    assert from_both < 20, "it would be a third to a half if it gave of both alike"


def test_a_reader_that_yields_shows_now_and_then_that_it_lives():
    scheduler = scheduler_of(50, shards=2)
    needy = scheduler.join(0, "both", 0.0)
    yielding = scheduler.join(1, "both", 0.0)
    scheduler.join(1, "other", 0.0)
    assert scheduler.turn(needy, 0.0, PLENTY).ask
    assert not scheduler.turn(yielding, 0.1, PLENTY).ask
    assert scheduler.turn(yielding, YIELD_S_MAX + 0.2, PLENTY).ask


def test_a_load_among_many_asks_for_a_chunk_per_reader_at_least_and_not_for_much_more():
    scheduler = scheduler_of(64)
    numbers = [scheduler.join(0, f"n{i}", 0.0) for i in range(4)]
    asked = [scheduler.turn(number, 0.0, 4 * MIB).ask for number in numbers]
    assert [len(run) for run in asked] == [1, 1, 1, 1]
    generous = scheduler_of(64)
    assert len(generous.turn(generous.join(0, "n", 0.0), 0.0, PLENTY).ask) == 2


def test_another_cut_of_a_shard_is_believed_only_while_the_first_is_of_no_use():
    scheduler = Scheduler([0])
    one, other = ChunkTable.uniform(4 * MIB, MIB), ChunkTable.uniform(4 * MIB, 2 * MIB)
    assert scheduler.describe(0, one)
    reader = scheduler.join(0, "a", 0.0)
    assert scheduler.describe(0, one)
    assert not scheduler.describe(0, other)
    scheduler.leave(reader)
    assert scheduler.describe(0, other)
    assert len(scheduler.turn(scheduler.join(0, "b", 0.0), 0.0, PLENTY).ask) == 2


def test_an_empty_shard_is_finished_as_soon_as_it_is_described():
    scheduler = Scheduler([0])
    assert not scheduler.finished(0)
    assert scheduler.describe(0, ChunkTable.uniform(0, MIB))
    assert scheduler.finished(0)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_every_chunk_is_got_exactly_once_whatever_fails(data, seed):
    """One source of each shard is good; the others are drawn. Nobody is asked for what it does not have."""
    rng = random.Random(seed)
    shards = data.draw(st.integers(1, 3))
    sizes = {s: [rng.randrange(1, 2 * MIB) for _ in range(rng.randrange(0, 30))] for s in range(shards)}
    scheduler = Scheduler(sizes)
    for shard, lengths in sizes.items():
        assert scheduler.describe(shard, ChunkTable(lengths))
    readings = [Reading(f"good{shard}", shard, rng.uniform(5e6, 60e6)) for shard in sizes]
    for number in range(data.draw(st.integers(0, 5))):
        for shard in sizes:
            if rng.random() < 0.6:
                readings.append(
                    Reading(
                        f"n{number}",
                        shard,
                        rng.choice([1e6, 10e6, 80e6]),
                        stops_at=rng.choice([float("inf"), rng.uniform(0, 2)]),
                        ends_at=rng.choice([float("inf"), float("inf"), rng.uniform(0, 2)]),
                        bad=frozenset(rng.sample(range(30), rng.randrange(0, 4))),
                    )
                )
    rng.shuffle(readings)
    # What the good ones bring stays good: a chunk that is lost to all of them would hang the simulation.
    _, got = simulate(scheduler, readings, sizes)
    assert sorted(got) == [
        (s, chunk) for s, lengths in sorted(sizes.items()) for chunk in range(len(lengths))
    ]
    for reading in readings:
        assert all(chunk < len(sizes[reading.shard]) for chunk in reading.received)
        assert all(reading.received.count(chunk) <= TRIES_MAX for chunk in reading.bad)


def test_of_a_part_only_its_chunks_are_asked_for():
    table = ChunkTable.uniform(6 * MIB, MIB)
    part = WantedChunks(table, (1, 2, 5))
    scheduler = Scheduler([0, 1], {0: part})
    assert part.bytes == 3 * MIB
    # Its numbers mean nothing for a shard that is cut in another way, whoever says so first.
    assert not scheduler.describe(0, ChunkTable.uniform(6 * MIB, 2 * MIB))
    assert scheduler.describe(0, table)
    assert scheduler.describe(1, ChunkTable.uniform(2 * MIB, MIB))
    got = {}
    for shard in (0, 1):
        reader = scheduler.join(shard, "a", 0.0)
        while not (turn := scheduler.turn(reader, 1.0, PLENTY)).over:
            for chunk in turn.ask:
                assert scheduler.wanted(reader, chunk)
                assert scheduler.got(reader, chunk, 1.0) == MIB
                got.setdefault(shard, []).append(chunk)
            assert turn.ask
        assert scheduler.finished(shard)
    assert got == {0: [1, 2, 5], 1: [0, 1]}
