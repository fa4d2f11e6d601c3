"""What a read asks for: refused where it makes no sense, else exactly the chunks that have some of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.chunks import ChunkTable
from fastcheckd.errors import InvalidRequestError
from fastcheckd.restore import ranges
from fastcheckd.restore.ranges import check_request, mark, shards_with, wants
from fastcheckd.store.segments import PAGE_BYTES


def step_of(*ranks: list[int]) -> rpb.StepRecord:
    """A step whose ranks have shards of these sizes."""
    step = rpb.StepRecord(job="gpt", step=5, world_size=len(ranks))
    for number, sizes in enumerate(ranks):
        rank = step.ranks.add(rank=number, state_bytes=sum(sizes))
        for shard, size in enumerate(sizes):
            rank.shards.add(shard=shard, offset=sum(sizes[:shard]), bytes=size)
    return step


def request_of(**ranks: list[tuple[int, int]]) -> tpb.ReadRequest:
    request = tpb.ReadRequest(job="gpt")
    for name, wanted in ranks.items():
        request.ranks.add(rank=int(name[1:])).ranges.extend(
            tpb.ByteRange(offset=offset, bytes=size) for offset, size in wanted
        )
    return request


@st.composite
def reads(draw):
    """Shards as lists of chunk lengths, rising ranges in the state that they make, and a header."""
    shards = draw(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=4))
    size = sum(map(sum, shards))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
    ranges = [(low, high - low) for low, high in zip(cuts[::2], cuts[1::2], strict=False) if low < high]
    low = draw(st.integers(0, size))
    header = range(low, draw(st.integers(low, size)))
    return shards, ranges, header, draw(st.booleans())


@given(reads())
def test_exactly_the_chunks_that_have_some_of_it_are_marked(read):
    shards, ranges, header, wants_header = read
    step = step_of(list(map(sum, shards)))
    request = request_of(r0=ranges)
    request.ranks[0].header = wants_header
    check_request(request)
    (want,) = wants(request, step)
    asked = {byte for low, size in ranges for byte in range(low, low + size)}
    of_ranges = sorted(asked)
    if wants_header:
        asked |= set(header)
    expected, at = {}, 0
    for number, lengths in enumerate(shards):
        for index, length in enumerate(lengths):
            if asked & set(range(at, at + length)):
                expected.setdefault(number, []).append(index)
            at += length
    marked = mark(want, header, {number: ChunkTable(lengths) for number, lengths in enumerate(shards)})
    assert {number: list(part.chunks) for number, part in marked.parts.items()} == expected
    # Every shard that has some of it is asked how it is cut.
    asked_shards = [*want.shards(), *(shards_with(want.record, header) if wants_header and header else [])]
    assert set(expected) <= {shard.shard for shard in asked_shards}
    # What is sent is what was asked for, and all of it lies in what will be written.
    sent = [byte for place in marked.places() for byte in place]
    assert sent == [*of_ranges, *(header if wants_header else ())]
    assert set(sent) <= {byte for stretch in marked.stretches() for byte in stretch}


def test_states_begin_at_pages_in_the_order_of_the_request():
    step = step_of([10], [PAGE_BYTES + 1], [5])
    found = wants(request_of(r1=[], r2=[], r0=[(3, 7)]), step)
    assert [(w.record.rank, w.offset) for w in found] == [(1, 0), (2, 2 * PAGE_BYTES), (0, 3 * PAGE_BYTES)]


def test_no_ranks_are_all_with_their_headers():
    assert [(w.record.rank, w.header) for w in wants(tpb.ReadRequest(), step_of([1], [2]))] == [
        (0, True),
        (1, True),
    ]


@pytest.mark.parametrize(
    ("ranges", "what"),
    [
        ([(4, 0)], "empty: leave it out"),
        ([(4, 4), (7, 1)], "sort and merge"),
        ([(4, 4), (0, 1)], "sort and merge"),
        ([(8, 3)], "ends at 11"),
        ([(2**63, 2**63)], "ends at"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges, what):
    request = request_of(r0=ranges)
    with pytest.raises(InvalidRequestError, match=what):
        check_request(request)
        wants(request, step_of([10]))


def test_ranks_that_are_not_there_or_named_twice_are_refused():
    with pytest.raises(InvalidRequestError, match="no rank 3: it was saved by 1"):
        wants(request_of(r3=[]), step_of([10]))
    request = request_of(r0=[], r1=[])
    request.ranks[1].rank = 0
    with pytest.raises(InvalidRequestError, match="put all its ranges together"):
        check_request(request)


def test_too_much_at_once_is_refused(monkeypatch):
    monkeypatch.setattr(ranges, "RANGES_MAX", 2)
    check_request(request_of(r0=[(0, 1), (2, 1)]))
    with pytest.raises(InvalidRequestError, match="ask for some at a time"):
        check_request(request_of(r0=[(0, 1), (2, 1)], r1=[(0, 1)]))
    with pytest.raises(InvalidRequestError, match="fewer ranks at a time"):
        wants(request_of(r0=[], r1=[]), step_of([1 << 44], [(1 << 44) + 1]))
