"""Slots: none overlaps another, what is free is one with its neighbours, and empty slabs go back."""

from __future__ import annotations

from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheckd.errors import OverBudgetError
from fastcheckd.store.segment_pools import SegmentPools
from fastcheckd.store.slots import SlotPool

PAGE = 4096


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 700_000), st.integers(-40, -1)), min_size=1, max_size=80))
def test_slots_do_not_overlap_and_all_memory_comes_back(tmp_path_factory, orders):
    folder = tmp_path_factory.mktemp("slots")
    pools = SegmentPools(folder, 8 << 20)
    slots = SlotPool(pools, 8 << 20)
    taken = []
    for order in orders:
        if order < 0:
            if taken:
                slots.free(taken.pop(order % len(taken)))
            continue
        try:
            place = slots.take(order, "gpt")
        except OverBudgetError:
            continue
        assert place.offset % PAGE == 0 and len(place.view) == order
        for other in taken:
            apart = (
                place.offset >= other.offset + other.slot_bytes
                or other.offset >= place.offset + place.slot_bytes
            )
            assert other.file is not place.file or apart
        taken.append(place)
        used = sum(each.slot_bytes for each in taken)
        usage = pools.usage()
        assert pools.job_bytes() == {"gpt": used}
        assert usage.used_bytes - usage.free_bytes - slots.free_bytes == used
    for place in taken:
        slots.free(place)
    usage = pools.usage()
    assert usage.used_bytes == usage.free_bytes and slots.free_bytes == 0 and pools.job_bytes() == {}


def test_a_stretch_between_two_that_are_freed_is_whole_again(tmp_path):
    pools = SegmentPools(tmp_path, 8 << 20)
    slots = SlotPool(pools, 8 << 20)
    places = [slots.take(256 << 10, "") for _ in range(4)]  # a slab of 1 MiB
    for number in (1, 3, 2):
        slots.free(places[number])
    assert slots.take(768 << 10, "").file is places[0].file


def test_what_is_bad_is_not_used_again(tmp_path):
    pools = SegmentPools(tmp_path, 4 << 20)
    slots = SlotPool(pools, 4 << 20)
    bad = slots.take(PAGE, "gpt")
    bad.bad = True
    slots.free(bad)
    assert pools.job_bytes() == {}
    again = []
    try:
        while True:
            again.append(slots.take(PAGE, ""))
    except OverBudgetError:
        pass
    assert len(again) == (4 << 20) // PAGE - 1
    assert not any(p.file is bad.file and p.offset == bad.offset for p in again)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(40_000, 300_000), min_size=20, max_size=60), st.randoms())
def test_step_after_step_of_a_shard_takes_the_same_memory(tmp_path_factory, lengths, random):
    """Two of them at a time, whichever order their slots become free in."""
    pools = SegmentPools(tmp_path_factory.mktemp("slots"), 64 << 20)
    slots = SlotPool(pools, 32 << 20)
    older, newer = slots.take_all(lengths, "gpt"), slots.take_all(lengths, "gpt")
    need = pools.usage().used_bytes
    for _ in range(4):
        random.shuffle(older)
        for place in older:
            slots.free(place)
        older, newer = newer, slots.take_all(lengths, "gpt")
        assert [place.length for place in newer] == lengths
        assert pools.usage().used_bytes == need


def test_slots_that_are_not_all_to_be_had_are_none(tmp_path):
    pools = SegmentPools(tmp_path, 8 << 20)
    slots = SlotPool(pools, 8 << 20)
    kept = slots.take(1 << 20, "gpt")
    with pytest.raises(OverBudgetError):
        slots.take_all([1 << 20] * 8, "gpt")
    assert pools.job_bytes() == {"gpt": 1 << 20}
    assert len(slots.take_all([1 << 20] * 7, "gpt")) == 7
    slots.free(kept)


def test_a_small_chunk_that_every_step_has_keeps_no_slab_from_the_next_one(tmp_path):
    pools = SegmentPools(tmp_path, 64 << 20)
    slots = SlotPool(pools, 32 << 20)
    lengths = [5000, *[300_000] * 20]
    (_, *older), newer = slots.take_all(lengths, "gpt"), slots.take_all(lengths[1:], "gpt")
    need = pools.usage().used_bytes
    for _ in range(3):
        for place in older:
            slots.free(place)
        older, newer = newer, slots.take_all(lengths[1:], "gpt")
    assert pools.usage().used_bytes == need


def test_a_step_that_finds_no_room_takes_no_slab_from_another_that_is_just_made(tmp_path, monkeypatch):
    pools = SegmentPools(tmp_path, 8 << 20)
    slots = SlotPool(pools, 8 << 20)
    enter = slots._enter
    refused = []

    def enter_beside_another(*args, **options):
        """A slab is known, nothing in it is taken yet, and a step of another thread ends without room."""
        slab = enter(*args, **options)
        if not refused:
            refused.append(Thread(target=slots._give_back_untouched))
            refused[0].start()
            refused[0].join(0.2)
        return slab

    monkeypatch.setattr(slots, "_enter", enter_beside_another)
    places = [slots.take(1 << 20, "gpt") for _ in range(3)]
    refused[0].join()
    assert len({place.file for place in places}) == 3, "each fills a slab, and no slab is given out twice"
    for place in places:
        slots.free(place)
    usage = pools.usage()
    assert usage.used_bytes == usage.free_bytes and slots.free_bytes == 0 and pools.job_bytes() == {}
