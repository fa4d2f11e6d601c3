from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.registry.commands import check_rank_record
from fastcheckd.save.content import cut

LENGTHS = st.lists(st.integers(1, 16 << 20), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("lengths", "count", "wanted"),
    [
        ([4, 4, 4, 4], 2, [(0, 2), (2, 4)]),
        ([4, 4, 4], 3, [(0, 1), (1, 2), (2, 3)]),
        ([10, 1, 1], 2, [(0, 1), (1, 3)]),
        ([1, 1, 10], 2, [(0, 2), (2, 3)]),
        ([1, 100, 1], 3, [(0, 1), (1, 2), (2, 3)]),
        ([100, 1, 1, 1], 3, [(0, 1), (1, 2), (2, 4)]),
        ([1, 1, 1, 100], 3, [(0, 2), (2, 3), (3, 4)]),
        ([3, 2, 3], 2, [(0, 1), (1, 3)]),  # both ends are as near: the earlier
        ([7], 5, [(0, 1)]),
        ([7, 7], 5, [(0, 1), (1, 2)]),
    ],
)
def test_cuts(lengths, count, wanted):
    assert [(r.start, r.stop) for r in cut(lengths, count)] == wanted


@given(LENGTHS, st.integers(1, 64))
def test_every_chunk_is_in_one_shard_and_no_shard_is_empty(lengths, count):
    found = cut(lengths, count)
    assert len(found) == min(count, len(lengths))
    assert all(len(stretch) > 0 for stretch in found)
    assert [i for stretch in found for i in stretch] == list(range(len(lengths)))
    assert found == cut(tuple(lengths), count)


@given(LENGTHS, st.integers(1, 64))
def test_no_shard_is_longer_than_an_even_one_by_more_than_a_chunk_on_each_side(lengths, count):
    if count > len(lengths):
        return
    even = sum(lengths) / count
    for stretch in cut(lengths, count):
        if len(stretch) > 1:
            assert sum(lengths[i] for i in stretch) <= even + max(lengths) + 1e-6


@given(LENGTHS, st.integers(1, 64))
def test_the_registry_takes_a_report_of_any_cut(lengths, count):
    ends = [0, *accumulate(lengths)]
    owner, holder = (pb.NodeRef(node_id=node_id, incarnation=1) for node_id in ("n0", "n1"))
    record = rpb.RankRecord(session=1, owner=owner, state_bytes=ends[-1])
    for index, r in enumerate(cut(lengths, count)):
        start, stop = ends[r.start], ends[r.stop]
        record.shards.add(shard=index, offset=start, bytes=stop - start, digest=bytes(16), holders=[holder])
    check_rank_record(record)
