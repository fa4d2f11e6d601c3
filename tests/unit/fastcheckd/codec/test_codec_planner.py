"""The planner on a simulated pipeline: whatever link and cores are like, a step is not slower than raw."""

import itertools
import random
from dataclasses import dataclass, replace
from statistics import mean

import pytest
from fastcheckd.codec.planner import (
    FRESH_MAX,
    PROBE_CHUNKS,
    REMEASURE_STEPS,
    TRIALS,
    Planner,
    Route,
    Sent,
    Way,
    best_fraction,
)
from hypothesis import given
from hypothesis import strategies as st

CHUNK = 4 << 20
LENGTHS = [CHUNK] * 64
BYTES = sum(LENGTHS)
ROUTE = Route("gpt", 0, 0, ("node-1",))
#: Bytes per second that a core copies into or out of a socket, hashing included.
COPY = 3e9
WARM_UP = 12


@dataclass(frozen=True)
class World:
    """A link, cores and data. Encoder, lane and decoder work side by side; the cores are shared by all of it."""

    link: float
    encode: float
    threads: int
    ratio: float
    cores: int = 64
    #: The holder is on the same machine.
    loopback: bool = False
    changed: float = 1.0
    #: Seconds that asking and acknowledging take.
    overhead_s: float = 0.002

    def seconds(self, coded: float, patch: bool) -> tuple[float, float]:
        """(time of a put, time inside sends) when a share `coded` of all bytes is encoded."""
        changed = self.changed if patch else 1.0
        lane = BYTES * (changed - coded + coded / self.ratio)
        decode_s = BYTES * coded / (1.5 * self.encode)
        encode_s = BYTES * coded / self.encode
        # The way back is one more copy of everything.
        ends = [lane / COPY + encode_s, lane / COPY + decode_s + patch * BYTES / COPY]
        cores_s = (sum(ends) if self.loopback else max(ends)) / self.cores
        send_s = max(lane / self.link, lane / COPY * (1 + self.loopback) / self.cores)
        return max(
            send_s, encode_s / self.threads, decode_s / self.threads, cores_s
        ) + self.overhead_s, send_s

    def raw_s(self) -> float:
        return self.seconds(0.0, patch=False)[0]

    def best_s(self) -> float:
        coded = [self.seconds(self.changed * share / 40, patch=True)[0] for share in range(41)]
        return min(self.raw_s(), *coded)


def train(planner, world, steps, *, first=0, noise=0.0, seed=1):
    """Save so many steps; (way, seconds) of each. Step 0 has no base."""
    rng = random.Random(seed)
    told = []
    unchanged = set(range(round(len(LENGTHS) * (1 - world.changed))))
    for step in range(first, first + steps):
        plan = planner.plan(ROUTE, LENGTHS, has_base=step > 0)
        patch = plan.offer_base and step > 0
        asked = [i for i in range(len(LENGTHS)) if not (patch and i in unchanged)]
        coded = sum(plan.choose(i) for i in asked) / len(LENGTHS)
        seconds, send_s = world.seconds(coded, patch)
        seconds *= 1 + noise * rng.uniform(-1, 1)
        lane = BYTES * (len(asked) / len(LENGTHS) - coded + coded / world.ratio)
        planner.learn(
            plan,
            Sent(
                seconds=seconds,
                sent_bytes=round(lane),
                send_s=min(send_s, seconds),
                encode_s=BYTES * coded / world.encode,
                patched=patch,
            ),
        )
        told.append((plan.way, seconds))
    return told


LINKS = [1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10]
RATES = [2e8, 7e8, 2e9]
THREADS = [1, 4, 16]
RATIOS = [1.01, 1.5, 3.5, 30.0]
GRID = [
    World(link=link, encode=rate, threads=threads, ratio=ratio, cores=cores, loopback=loopback)
    for link, rate, threads, ratio in itertools.product(LINKS, RATES, THREADS, RATIOS)
    for cores, loopback in ((2 * threads, False), (2 * threads, True))
]


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_no_link_and_no_cores_make_a_step_slower_than_raw(noise):
    slow, far = [], 0
    for world in GRID:
        told = train(Planner("auto", world.threads), world, 250, noise=noise)
        seconds = mean(s for _, s in told[WARM_UP:])
        if seconds > 1.05 * world.raw_s():
            slow.append((world, seconds / world.raw_s()))
        far += seconds > 1.15 * world.best_s()
    assert not slow
    assert far < 0.1 * len(GRID)


def test_the_warm_up_costs_a_few_steps():
    for world in GRID:
        told = train(Planner("auto", world.threads), world, WARM_UP)
        extra = sum(s for _, s in told) / world.raw_s() - WARM_UP
        # Two trials; at worst every thread competes with what sends.
        assert extra < 2 * (1 + world.threads), world


def test_fresh_memory_at_the_holder_is_not_taken_for_a_slow_link():
    planner = Planner("auto", LOOPBACK.threads)
    raw_s = LOOPBACK.raw_s()
    for step in range(3):
        plan = planner.plan(ROUTE, LENGTHS, has_base=step > 0)
        assert plan.way is Way.RAW
        planner.learn(
            plan,
            Sent(
                seconds=6 * raw_s,
                sent_bytes=BYTES,
                send_s=6 * raw_s,
                encode_s=0,
                patched=False,
                fresh_memory=True,
            ),
        )
    told = train(planner, LOOPBACK, 40, first=3)
    assert all(way is Way.RAW for way, _ in told[WARM_UP:])


def test_memory_that_is_always_fresh_is_believed_in_the_end():
    planner = Planner("auto", 1)
    for step in range(FRESH_MAX + TRIALS + 1):
        plan = planner.plan(ROUTE, LENGTHS, has_base=step > 0)
        planner.learn(
            plan, Sent(seconds=9, sent_bytes=BYTES, send_s=9, encode_s=0, patched=False, fresh_memory=True)
        )
    assert planner.plan(ROUTE, LENGTHS, has_base=True).way is Way.PROBE


SLOW_LINK = World(link=1e8, encode=7e8, threads=4, ratio=3.5)
LOOPBACK = World(link=1e10, encode=7e8, threads=1, ratio=3.5, cores=2, loopback=True)


def test_a_slow_link_has_everything_encoded():
    planner = Planner("auto", 4)
    told = train(planner, SLOW_LINK, 30)
    assert [way for way, _ in told[:2]] == [Way.RAW, Way.PROBE]
    assert [way for way, _ in told[WARM_UP:]] == [Way.CODED] * (30 - WARM_UP)
    assert planner.plan(ROUTE, LENGTHS, has_base=True).fraction == 1
    assert mean(s for _, s in told[WARM_UP:]) < 0.4 * SLOW_LINK.raw_s()


def test_loopback_with_two_cores_is_raw():
    told = train(Planner("auto", 1), LOOPBACK, 300)
    assert sum(way is Way.RAW for way, _ in told[WARM_UP:]) > 0.95 * (300 - WARM_UP)


def test_a_link_as_fast_as_the_threads_gets_a_mixture():
    world = World(link=2.8e9, encode=7e8, threads=4, ratio=3.5, cores=64)
    planner = Planner("auto", 4)
    told = train(planner, world, 60)
    assert 0.4 < planner.plan(ROUTE, LENGTHS, has_base=True).fraction < 0.8
    assert mean(s for _, s in told[WARM_UP:]) < 0.75 * world.raw_s()


def test_what_does_not_shrink_is_not_encoded():
    told = train(Planner("auto", 4), replace(SLOW_LINK, ratio=1.0), 60)
    assert [way for way, _ in told[2:REMEASURE_STEPS]] == [Way.RAW] * (REMEASURE_STEPS - 2)


def test_frozen_parameters_make_a_patch_worth_it_on_any_link():
    world = World(link=3e9, encode=2e8, threads=1, ratio=1.0, changed=0.1, cores=64)
    told = train(Planner("auto", 1), world, 60)
    assert mean(s for _, s in told[WARM_UP:]) < 0.5 * world.raw_s()


@pytest.mark.parametrize(
    ("before", "after"), [(1e10, 1e7), (1e7, 1e10), (1e8, 3e9), (3e9, 1e8)], ids=lambda rate: f"{rate:.0e}"
)
def test_a_link_that_changes_is_noticed(before, after):
    world = replace(LOOPBACK, link=before, loopback=False)
    planner = Planner("auto", 1)
    train(planner, world, 200)
    changed = replace(world, link=after)
    told = train(planner, changed, 800, first=200)
    assert mean(s for _, s in told[100:]) < 1.1 * min(changed.raw_s(), 1.2 * changed.best_s())


def test_a_hiccup_changes_nothing():
    planner = Planner("auto", 4)
    train(planner, SLOW_LINK, 30)
    train(planner, replace(SLOW_LINK, overhead_s=10), 1, first=30)
    assert [way for way, _ in train(planner, SLOW_LINK, 10, first=31)] == [Way.CODED] * 10


@pytest.mark.parametrize(("world", "way"), [(LOOPBACK, Way.RAW), (SLOW_LINK, Way.CODED)])
def test_a_bad_while_is_forgotten_soon(world, way):
    planner = Planner("auto", world.threads)
    train(planner, world, 100)
    train(planner, replace(world, overhead_s=30), 3, first=100)
    told = train(planner, world, 100, first=103)
    assert sum(used is way for used, _ in told[12:]) > 0.9 * 88


def test_small_steps_of_uneven_length_stay_raw_on_loopback():
    told = train(Planner("auto", 1), LOOPBACK, 500, noise=0.5)
    assert sum(way is Way.RAW for way, _ in told[WARM_UP:]) > 0.95 * (500 - WARM_UP)


def test_trials_stay_within_their_share():
    world = replace(SLOW_LINK, link=1e7)
    told = train(Planner("auto", 4), world, 3000)
    usual = world.seconds(1.0, patch=True)[0]
    extra = sum(max(0, s - usual) for _, s in told[WARM_UP:])
    assert 0 < extra < 0.04 * sum(s for _, s in told[WARM_UP:])


def test_always_and_never_ask_nobody():
    always, never = Planner("always", 1), Planner("never", 1)
    assert {way for way, _ in train(always, LOOPBACK, 20)} == {Way.CODED}
    assert all(always.plan(ROUTE, LENGTHS, has_base=base).choose(i) for base in (0, 1) for i in range(64))
    assert {way for way, _ in train(never, SLOW_LINK, 20)} == {Way.RAW}
    plan = never.plan(ROUTE, LENGTHS, has_base=True)
    assert not plan.offer_base and not plan.choose(0)


def test_where_memory_is_short_all_that_has_a_base_is_encoded_however_fast_the_link():
    planner = Planner("auto", 1)
    train(planner, LOOPBACK, 20)
    plan = planner.plan(ROUTE, LENGTHS, has_base=True, lean=True)
    assert plan.offer_base and all(plan.choose(i) for i in range(64))
    assert not planner.plan(ROUTE, LENGTHS, has_base=False, lean=True).offer_base
    assert not Planner("never", 1).plan(ROUTE, LENGTHS, has_base=True, lean=True).offer_base


def test_a_probe_takes_a_few_chunks_and_at_least_one():
    planner = Planner("auto", 1)
    train(planner, SLOW_LINK, 1)
    plan = planner.plan(ROUTE, LENGTHS, has_base=True)
    assert plan.way is Way.PROBE and 1 <= sum(map(plan.choose, range(64))) <= PROBE_CHUNKS + 2
    for count in range(1, 40):
        few = Planner("auto", 1)
        few.learn(
            few.plan(ROUTE, [CHUNK] * count, has_base=False),
            Sent(seconds=1, sent_bytes=1, send_s=1, encode_s=0, patched=False),
        )
        assert few.plan(ROUTE, [CHUNK] * count, has_base=True).choose(0)


def test_holders_that_refuse_the_base_teach_nothing_about_patches():
    planner = Planner("auto", 4)
    train(planner, SLOW_LINK, 1)
    for _ in range(5):
        plan = planner.plan(ROUTE, LENGTHS, has_base=True)
        planner.learn(plan, Sent(seconds=9, sent_bytes=BYTES, send_s=9, encode_s=0, patched=False))
    assert plan.way is Way.PROBE


def test_other_holders_are_another_course():
    planner = Planner("auto", 4)
    train(planner, SLOW_LINK, 30)
    other = replace(ROUTE, holders=("node-2",))
    assert planner.plan(other, LENGTHS, has_base=True).way is Way.RAW


def test_chosen_chunks_are_spread_over_all_connections():
    planner = Planner("always", 1)
    plan = planner.plan(ROUTE, LENGTHS, has_base=True)
    plan.fraction = 0.5
    for streams in (1, 2, 3, 4, 8):
        for first in range(streams):
            own = [plan.choose(i) for i in range(first, 64, streams)]
            assert 0.25 <= mean(own) <= 0.75


rates = st.floats(1e6, 1e11)


@given(rates, rates, st.floats(0.5, 1000), st.floats(0.01, 1))
def test_the_formulas_share_is_the_best_there_is(link, encode, ratio, changed):
    def pace(share):
        return changed * max(share / encode, (1 - share + share / ratio) / link)

    fraction, speedup = best_fraction(link=link, encode=encode, ratio=ratio, changed=changed)
    assert 0 <= fraction <= 1
    assert speedup == pytest.approx(1 / link / pace(fraction))
    assert all(pace(fraction) <= pace(share / 50) * (1 + 1e-9) for share in range(51))
    assert speedup >= 1 - 1e-9
