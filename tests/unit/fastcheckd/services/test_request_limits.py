"""What a request may weigh before it is parsed, what it may hold after it, and what a caller may have in hand."""

from __future__ import annotations

import pytest

from fastcheck_proto.conventions import LAYOUT_BYTES_MAX, REQUEST_BYTES_MAX
from fastcheck_proto.v1 import layout_pb2, trainer_pb2
from fastcheckd.errors import InvalidRequestError, OverBudgetError
from fastcheckd.services import roles
from fastcheckd.services.request_limits import (
    CALLER_BYTES_MAX,
    CHUNKS_MAX,
    OPTIMIZER_STEPS_MAX,
    PIECE_BYTES_MAX,
    RANGES_MAX,
    RUNS_MAX,
    SMALL_BYTES_MAX,
    UPLOAD_BYTES_MAX,
    InHand,
    bytes_max,
    check_bytes,
    too_many,
    too_many_of_a_seal,
)

SESSION, UPLOAD, READ = (f"/fastcheck.v1.TrainerService/{name}" for name in ("Session", "Upload", "Read"))
BOB = roles.Caller(roles.TRAINER, "bob")


def test_only_what_describes_a_state_may_be_large():
    large = {
        method
        for service, methods in roles.RULES.items()
        for name in methods
        if bytes_max(method := f"/{service}/{name}") == REQUEST_BYTES_MAX
    }
    assert large == {SESSION, READ}
    check_bytes(UPLOAD, PIECE_BYTES_MAX + 100)
    with pytest.raises(InvalidRequestError):
        check_bytes(UPLOAD, UPLOAD_BYTES_MAX + 1)
    with pytest.raises(InvalidRequestError, match="at most 65536 bytes"):
        check_bytes("/fastcheck.v1.TrainerService/ListSteps", SMALL_BYTES_MAX + 1)
    check_bytes("/fastcheck.v1.PeerService/FinishPut", REQUEST_BYTES_MAX)  # nodes': as their port says


@pytest.mark.parametrize(
    ("what", "most", "layout"),
    [
        ("chunks", CHUNKS_MAX, lambda count: {"chunks": [layout_pb2.ChunkLayout()] * count}),
        (
            "optimizer steps",
            OPTIMIZER_STEPS_MAX,
            lambda count: {"optimizer_steps": [layout_pb2.OptimizerStep()] * count},
        ),
        (
            "runs",
            RUNS_MAX,
            lambda count: {
                "chunks": [layout_pb2.ChunkLayout(runs=[layout_pb2.Run()] * (count - 1)), {"runs": [{}]}]
            },
        ),
    ],
)
def test_a_layout_has_so_many_elements_wherever_it_comes(what, most, layout):
    for count, refused in ((most, False), (most + 1, True)):
        said = layout_pb2.StateLayout(**layout(count))
        sealed = trainer_pb2.Sealed(layout=said)
        for found in (
            too_many(SESSION, trainer_pb2.TrainerMessage(sealed=sealed)),
            too_many_of_a_seal(sealed),  # found in a segment
        ):
            assert bool(found) is refused
            assert not refused or what in found


def test_the_layout_of_a_huge_state_fits():
    """100 GB of Adam's state in bf16 and fp32: 25,000 chunks of four runs."""
    run = layout_pb2.Run(offset=3 << 20, elements=1 << 20, dtype="bfloat16", role=3, unit=9, optimizer_step=2)
    chunk = layout_pb2.ChunkLayout(bytes=4 << 20, runs=[run] * 4)
    layout = layout_pb2.StateLayout(schema=1, chunks=[chunk] * 25_000)
    assert layout.ByteSize() < LAYOUT_BYTES_MAX // 3
    assert not too_many(SESSION, trainer_pb2.TrainerMessage(sealed={"layout": layout}))


def test_a_read_has_so_many_ranges():
    ranges = [trainer_pb2.ByteRange()] * RANGES_MAX
    assert not too_many(READ, trainer_pb2.ReadRequest(ranks=[{"ranges": ranges}]))
    assert too_many(READ, trainer_pb2.ReadRequest(ranks=[{"ranges": ranges}, {"ranges": ranges[:1]}]))


def test_a_caller_has_so_much_in_hand_and_takes_nothing_of_anothers():
    hand = InHand()
    size = REQUEST_BYTES_MAX
    taken = [hand.take(BOB, size) for _ in range(CALLER_BYTES_MAX // size)]
    with pytest.raises(OverBudgetError, match="trainer/bob"):
        hand.take(BOB, size)
    assert hand.take(BOB, 100) == 0, "small ones cost nothing"
    assert hand.take(roles.Caller(roles.TRAINER, "alice"), size) == size
    assert hand.take(roles.LOCAL, size) == 0, "this machine's own user"
    hand.give(BOB, taken.pop())
    assert hand.take(BOB, size) == size
