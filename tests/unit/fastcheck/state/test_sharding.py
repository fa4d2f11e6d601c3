"""Wanted boxes are made up of saved ones: nothing twice, nothing left out, and holes are named."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck.state.sharding import Box, HolesError, cover


def cells(box):
    return set(product(*(range(low, high) for low, high in zip(box.offsets, box.ends, strict=True))))


@st.composite
def boxes_in(draw, shape):
    lows = [draw(st.integers(0, size)) for size in shape]
    return Box(
        tuple(lows),
        tuple(draw(st.integers(0, size - low)) for size, low in zip(shape, lows, strict=True)),
    )


@st.composite
def cuttings(draw):
    """A shape, what each rank has of it (any boxes), and one that is wanted."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    ranks = draw(st.lists(boxes_in(shape), max_size=8))
    return dict(enumerate(ranks)), draw(boxes_in(shape))


@given(cuttings(), st.integers(0, 9))
def test_every_wanted_element_comes_once_from_a_rank_that_has_it_or_is_named_as_missing(cutting, rank):
    saved, wanted = cutting
    there = set().union(*(cells(box) for box in saved.values())) & cells(wanted)
    try:
        found = cover(wanted, saved, rank)
    except HolesError as error:
        missing = [cell for hole in error.holes for cell in cells(hole)]
        assert sorted(missing) == sorted(cells(wanted) - there) != []
        return
    taken = [cell for source in found for cell in cells(source.box)]
    assert sorted(taken) == sorted(cells(wanted))
    for source in found:
        assert source.box.lies_in(saved[source.rank])
        assert source.box.elements


@given(cuttings(), st.integers(0, 20))
def test_pieces_of_a_box_are_all_of_it_once_and_small(cutting, elements_max):
    _, box = cutting
    pieces = list(box.pieces(elements_max))
    assert [cell for piece in pieces for cell in sorted(cells(piece))] == sorted(cells(box))
    assert all(piece.elements <= max(1, elements_max) for piece in pieces)


@given(cuttings())
def test_what_is_left_of_a_box_is_apart_from_what_was_taken_and_from_itself(cutting):
    saved, wanted = cutting
    for box in saved.values():
        left = [cell for part in wanted.minus(box) for cell in cells(part)]
        assert sorted(left) == sorted(cells(wanted) - cells(box))
        both = wanted.meet(box)
        assert (cells(both) if both else set()) == cells(wanted) & cells(box)


def test_replicas_are_had_from_oneself_else_readers_are_spread():
    halves = {rank: Box((rank % 2 * 4,), (4,)) for rank in range(8)}
    whole = Box((0,), (8,))
    assert sorted(s.rank for s in cover(whole, halves, 5)) == [2, 5], "its own half, and one of the other's"
    assert [s.rank for s in cover(Box((4,), (4,)), halves, 5)] == [5]
    upper = {rank for reader in range(100, 104) for rank, _ in cover(Box((4,), (4,)), halves, reader)}
    assert upper == {1, 3, 5, 7}


def test_few_large_parts_are_taken_before_many_small_ones():
    saved = {0: Box((0, 0), (2, 8)), 1: Box((2, 0), (2, 8)), 2: Box((0, 0), (4, 8))}
    assert cover(Box((0, 0), (4, 8)), saved, 0) == [(2, Box((0, 0), (4, 8)))]


def test_scalars_and_nothing():
    scalar = Box((), ())
    assert cover(scalar, {3: scalar}, 0) == [(3, scalar)]
    assert cover(Box((0,), (0,)), {}, 0) == []
    with pytest.raises(HolesError, match=r"\[4:6\]"):
        cover(Box((2,), (4,)), {0: Box((0,), (4,)), 1: Box((6,), (2,))}, 0)
    assert math.prod(()) == scalar.elements
