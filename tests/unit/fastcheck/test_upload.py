"""The same promises through gRPC streams, for a trainer whose daemon is on another machine."""

from __future__ import annotations

import pytest
import torch
from fake_daemon import FakeDaemon
from tests.unit.fastcheck.state_bytes import same, snapshot

from fastcheck import Checkpointer, CorruptError, FastCheckError, OutOfMemoryError, StepNotFoundError
from fastcheck.progress import Reporter
from fastcheck.state.flatten import flatten
from fastcheck.upload import _messages, _receive
from fastcheck_proto.conventions import STREAM_PIECE_BYTES
from fastcheck_proto.v1 import common_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb


def make_state(seed: int) -> dict:
    torch.manual_seed(seed)
    big = torch.randn(400_000)
    return {
        "big": big,
        "again": big,
        "small": [torch.randn(i) for i in range(20)],
        "strided": torch.randn(30, 40).t(),
        "bf16": torch.randn(7).to(torch.bfloat16),
        "n": seed,
    }


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as running:
        yield running


@pytest.fixture
def ckpt(daemon):
    with Checkpointer(job="gpt", address=daemon.tcp_address) as made:
        yield made


def test_upload_then_pull(daemon, ckpt):
    source = make_state(1)
    handle = ckpt.save(5, source).result(timeout=20)
    assert handle.committed
    assert handle.stats["bytes"] == flatten(source).state_bytes
    back = make_state(2)
    assert ckpt.load(back) == 5
    assert same(back, source)
    assert {"Upload", "sealed", "Pull"} <= set(daemon.calls)
    assert "Load" not in daemon.calls


def test_nothing_and_absent_steps(ckpt):
    assert ckpt.load({}) is None
    with pytest.raises(StepNotFoundError):
        ckpt.load({}, step=4)


@pytest.mark.parametrize("call", ["reserve", "Upload", "sealed"])
def test_a_refusal_is_in_the_handle(daemon, ckpt, call):
    daemon.refuse[call] = (common_pb2.ERROR_CODE_OVER_BUDGET, "full")
    with pytest.raises(OutOfMemoryError, match="full"):
        ckpt.save(1, make_state(1)).result(timeout=60)


def test_the_stream_holds_exactly_what_a_segment_would():
    state = make_state(3)
    flat = flatten(state)
    messages = list(_messages(pb.UploadTarget(segment_id="x"), flat))
    assert messages[0].target.segment_id == "x"
    pieces = [m.data for m in messages[1:]]
    assert {len(p) for p in pieces[:-1]} == {STREAM_PIECE_BYTES}
    assert 0 < len(pieces[-1]) <= STREAM_PIECE_BYTES
    streamed = b"".join(pieces)
    assert len(streamed) == flat.state_bytes
    kept = snapshot(state)
    buffer = kept.segment.tensor[: kept.state_bytes]
    for piece in flat.pieces:
        stop = piece.offset + piece.bytes
        assert streamed[piece.offset : stop] == bytes(buffer[piece.offset : stop].tolist())
    assert streamed[flat.header_offset :].rstrip(b"\0") == flat.header.rstrip(b"\0")
    assert streamed == bytes(buffer.tolist())


READY = pb.LoadReady(step=1, state_bytes=10, header_offset=5, header_bytes=5)


def answer(*parts: object) -> list[pb.PullResponse]:
    return [
        pb.PullResponse(data=p)
        if isinstance(p, bytes)
        else pb.PullResponse(ready=p)
        if p
        else pb.PullResponse()
        for p in parts
    ]


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        (answer(READY, b"123"), CorruptError),
        (answer(READY, b"1" * 11), CorruptError),
        (answer(READY, b"1" * 9, b"22"), CorruptError),
        (answer(b"1"), FastCheckError),
        (answer(None), FastCheckError),
        ([], FastCheckError),
        (answer(pb.LoadReady(step=2, state_bytes=10)), CorruptError),
        (answer(pb.LoadReady(step=1, state_bytes=4, header_bytes=5)), CorruptError),
        (answer(pb.LoadReady(step=1, state_bytes=2**63)), OutOfMemoryError),
        (answer(pb.LoadReady(step=1, state_bytes=2**62)), OutOfMemoryError),
    ],
)
def test_streams_that_make_no_sense_are_refused_without_taking_memory(messages, kind):
    with pytest.raises(kind):
        _receive(iter(messages), pb.LoadRequest(step=1), allow_lossy=False, reporter=Reporter(None))


def test_a_good_stream_is_received():
    found = _receive(
        iter(answer(READY, b"1234", b"567890")),
        pb.LoadRequest(step=1),
        allow_lossy=False,
        reporter=Reporter(None),
    )
    assert found is not None
    assert bytes(found[1].tensor[:10].tolist()) == b"1234567890"
