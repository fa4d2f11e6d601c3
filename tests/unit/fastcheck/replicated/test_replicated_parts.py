"""How a shared state is cut: into everything, once, evenly, and the same way on every rank."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck.replicated.parts import cut, partner, share
from fastcheck.state.layout import Extent, Group, Member, arrange
from fastcheck_proto.v1 import layout_pb2

LENGTHS = st.lists(st.integers(1, 4 << 20), max_size=200)
RANKS = st.integers(1, 40)

#: Shapes from a scalar to more than a chunk; a group of them has a parameter and two moments.
SHAPES = st.lists(
    st.tuples(
        st.sampled_from([(), (0,), (7,), (1000, 3), (1 << 20,), (2_500_000,), (700, 5000)]), st.booleans()
    ),
    max_size=12,
)


@given(LENGTHS, RANKS)
def test_the_parts_are_all_chunks_in_order_and_none_twice(lengths, ranks):
    parts = cut(lengths, ranks)
    assert len(parts) == ranks
    assert [chunk for part in parts for chunk in part] == list(range(len(lengths)))


@given(LENGTHS, RANKS)
def test_no_part_is_further_from_an_even_share_than_a_chunk_is_long(lengths, ranks):
    even = sum(lengths) / ranks
    for part in cut(lengths, ranks):
        assert abs(sum(lengths[part.start : part.stop]) - even) <= max(lengths, default=0)


def shared(shapes, ranks):
    extents, groups = [], []
    for shape, grouped in shapes:
        slots = range(len(extents), len(extents) + (3 if grouped else 1))
        extents += [Extent("float32", shape, True) for _ in slots]
        if grouped:
            groups.append(Group(tuple(Member(slot, layout_pb2.ROLE_UNSPECIFIED) for slot in slots)))
    return extents, groups, share(arrange(extents, groups), extents, ranks)


@settings(max_examples=40, deadline=None)
@given(SHAPES, RANKS)
def test_every_element_of_every_tensor_lies_in_one_part_and_is_compared_there(shapes, ranks):
    extents, groups, sharing = shared(shapes, ranks)
    stretches = [s for part in range(ranks) for s in sharing.stretches_of(part)]
    assert stretches == list(sharing.stretches)
    for part in range(ranks):
        for stretch in sharing.stretches_of(part):
            assert sharing.cuts[part] <= stretch.offset
            assert stretch.offset + stretch.bytes <= sharing.cuts[part + 1]
    for found in (stretches, [entry for part in sharing.entries for entry in part]):
        for slot, extent in enumerate(extents):
            at = 0
            for one in found:
                if one.slot == slot:
                    assert one.first == at
                    at += one.elements
            assert at == extent.elements
    for first, second in pairwise(stretches):
        assert first.offset + first.bytes <= second.offset
    # A parameter and its moments stay together: the same elements of all of them are in the same part.
    for group in groups:
        for entries in sharing.entries:
            mine = [(e.first, e.elements) for e in entries if e.slot in {m.slot for m in group.members}]
            assert len(set(mine)) <= 1 and len(mine) in (0, len(group.members))


@settings(max_examples=40, deadline=None)
@given(SHAPES, RANKS)
def test_what_is_the_same_is_cut_the_same_and_has_the_same_digest(shapes, ranks):
    digests = []
    for _ in range(2):
        extents, _, sharing = shared(shapes, ranks)
        digests.append(sharing.digest([(f"t{slot}", extent, slot) for slot, extent in enumerate(extents)]))
    assert digests[0] == digests[1]
    extents, _, sharing = shared(shapes, ranks)
    renamed = [(f"x{slot}", extent, slot) for slot, extent in enumerate(extents)]
    assert not renamed or sharing.digest(renamed) != digests[0]
    assert shared(shapes, ranks + 1)[2].digest([]) != sharing.digest([])


@given(st.integers(1, 50), st.integers(0, 2**62))
def test_in_pairs_each_part_is_looked_at_by_its_own_rank_and_one_other(ranks, step):
    partners = [partner(rank, ranks, step) for rank in range(ranks)]
    assert sorted(partners) == list(range(ranks))
    assert ranks == 1 or all(other != rank for rank, other in enumerate(partners))


def test_partners_change_so_that_everybody_is_looked_at_whatever_the_interval_between_saves():
    for interval in (1, 4, 100, 1000):
        assert {partner(0, 4, interval * save) for save in range(1, 40)} == {1, 2, 3}
