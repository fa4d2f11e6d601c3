"""The SDK's reader against a daemon that answers well, badly, or not at all."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.fastcheck.state_bytes import snapshot

from fastcheck import CorruptError, FastCheckError, InvalidArgumentError, LoadFailedError, StepNotFoundError
from fastcheck.errors import ReplicationError
from fastcheck.progress import CallbackFailedError, Reporter
from fastcheck.step_reader import BoxInto, StepReader, merged
from fastcheck_proto.v1 import trainer_pb2 as pb

STATE = {"w": torch.arange(12, dtype=torch.float32).view(3, 4), "step": 7}


class Stream(list):
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FarDaemon:
    """Answers each read by what `answer` makes of it, as messages of a stream."""

    local = False

    def __init__(self, answer) -> None:
        self.answer = answer
        self.streams: list[Stream] = []

    @contextlib.contextmanager
    def errors(self, connect_s):
        yield SimpleNamespace(trainer=SimpleNamespace(Read=self._read))

    @contextlib.contextmanager
    def guarded(self, link, call):
        yield

    def _read(self, request, timeout):
        self.streams.append(Stream(self.answer(request)))
        return self.streams[-1]


def honest(request, *, change=lambda ready: None, piece_bytes=7):
    """One rank that saved STATE."""
    assert request.by_stream
    saved = snapshot(STATE)
    data = bytes(saved.segment.tensor[: saved.state_bytes].numpy())
    header_offset = data.index(saved.header)
    ready = pb.ReadReady(step=5, world_size=1)
    ready.ranks.add(state_bytes=len(data), header_offset=header_offset, header_bytes=len(saved.header))
    ranges = [(r.offset, r.bytes) for rank in request.ranks for r in rank.ranges]
    if not request.ranks:
        ranges = [(header_offset, len(saved.header))]
    sent = b"".join(data[low : low + size] for low, size in ranges)
    yield pb.ReadResponse(progress=pb.LoadProgress())
    change(ready)
    yield pb.ReadResponse(ready=ready)
    for low in range(0, len(sent), piece_bytes):
        yield pb.ReadResponse(data=sent[low : low + piece_bytes])


def test_a_box_comes_by_stream_however_it_is_cut_and_streams_are_ended():
    daemon = FarDaemon(honest)
    with StepReader(daemon, "gpt") as reader:
        assert (reader.step, reader.world_size, reader.lossy) == (5, 1, False)
        record = reader.ranks[0].header.tensors[0]
        target = torch.zeros(2, 2)
        reader.fill([BoxInto(0, record, (1, 2), (2, 2), target)])
        assert torch.equal(target, STATE["w"][1:3, 2:4])
        with reader.read({}) as states:
            assert states == {}
        with reader.read({0: [(0, 4)]}) as states:
            kept = states
        assert not kept, "valid inside the block only"
    assert [stream.cancelled for stream in daemon.streams] == [True] * 3


def test_a_reader_tells_how_far_a_read_is_and_a_callback_may_end_it():
    def answer(request):
        for done in (1, 2):
            yield pb.ReadResponse(progress=pb.LoadProgress(bytes_done=done, bytes_total=4, holders=1))
        counted = set_(local_bytes=1, fetched_bytes=3, holders=1)
        yield from list(honest(request, change=counted))[1:]

    daemon, heard = FarDaemon(answer), []
    box = functools.partial(BoxInto, offsets=(0, 0), sizes=(3, 4))
    with StepReader(daemon, "gpt") as reader:
        record, target = reader.ranks[0].header.tensors[0], torch.zeros(3, 4)
        reader.fill([box(0, record, target=target)], Reporter(heard.append))
        assert [(news.bytes_done, news.bytes_total, news.holders) for news in heard] == [
            (1, 4, 1), (2, 4, 1), (4, 4, 1)
        ]  # fmt: skip
        assert torch.equal(target, STATE["w"])
        heard.clear()
        reader.fill([], Reporter(heard.append))
        assert [(news.bytes_done, news.bytes_total) for news in heard] == [(0, 0)]

        target.zero_()
        for allowed in range(3):
            left = iter(range(allowed))
            with pytest.raises(CallbackFailedError):
                reader.fill([box(0, record, target=target)], Reporter(lambda _, left=left: next(left)))
        assert not target.any()
    assert all(stream.cancelled for stream in daemon.streams)


def set_(**fields):
    def change(ready):
        for name, value in fields.items():
            setattr(
                ready if name in {f.name for f in ready.DESCRIPTOR.fields} else ready.ranks[0], name, value
            )

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_(step=6),
        set_(rank=1),
        set_(offset=3),
        set_(header_bytes=2**40),
        set_(header_offset=2**63),
        lambda ready: ready.ranks.add(rank=1, offset=0, state_bytes=64),
        lambda ready: ready.ranks.pop(),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(change):
    daemon = FarDaemon(honest)
    with StepReader(daemon, "gpt") as reader:
        daemon.answer = lambda request: honest(request, change=change)
        with pytest.raises(CorruptError), reader.read({0: [(0, 4)]}):
            pass
    assert all(stream.cancelled for stream in daemon.streams)


@pytest.mark.parametrize("world_size", [0, 2])
def test_ranks_that_are_missing_are_noticed(world_size):
    daemon = FarDaemon(lambda request: honest(request, change=set_(world_size=world_size)))
    with pytest.raises(CorruptError), StepReader(daemon, "gpt"):
        pass


@pytest.mark.parametrize("cut", [-1, 1])
def test_more_or_fewer_bytes_than_asked_for_are_noticed(cut):
    def answer(request):
        messages = list(honest(request))
        return messages[:-1] if cut < 0 else [*messages, pb.ReadResponse(data=b"x")]

    with (
        pytest.raises(CorruptError, match="less" if cut < 0 else "more"),
        StepReader(FarDaemon(answer), "gpt"),
    ):
        pass


def test_a_stream_that_ends_or_says_something_else_is_an_error():
    for messages in ([], [pb.ReadResponse(data=b"x")], [pb.ReadResponse()]):
        with (
            pytest.raises(FastCheckError, match="see its log"),
            StepReader(FarDaemon(lambda _, m=messages: m), "gpt"),
        ):
            pass
    nothing = [pb.ReadResponse(nothing=pb.LoadNothing())]
    with (
        pytest.raises(StepNotFoundError, match="no committed step"),
        StepReader(FarDaemon(lambda _: nothing), "gpt"),
    ):
        pass


def test_an_error_of_peers_is_one_of_loading():
    def answer(request):
        raise ReplicationError("nobody answers")

    with pytest.raises(LoadFailedError, match="nobody answers"), StepReader(FarDaemon(answer), "gpt"):
        pass


def test_what_does_not_exist_is_not_asked_for():
    daemon = FarDaemon(honest)
    with StepReader(daemon, "gpt") as reader:
        size = reader.ranks[0].state_bytes
        for wants in ({1: [(0, 1)]}, {0: [(size, 1)]}, {0: [(-1, 1)]}, {0: [(0, -1)]}):
            with pytest.raises(InvalidArgumentError), reader.read(wants):
                pass
    assert len(daemon.streams) == 1


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10))))
def test_merged_ranges_are_the_same_bytes_apart_and_in_order(ranges):
    found = merged(ranges, 50)
    assert {b for low, size in found for b in range(low, low + size)} == {
        b for low, size in ranges for b in range(low, low + size)
    }
    ends = [low + size for low, size in found]
    assert all(size > 0 for _, size in found)
    assert all(end < low for end, (low, _) in zip(ends, found[1:], strict=False))
