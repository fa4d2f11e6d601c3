"""A layout is the SDK's word about bytes: taken when it makes sense, refused as a defect of the SDK when not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_proto.conventions import LAYOUT_SCHEMA
from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.chunks import CHUNK_LENGTH_MAX
from fastcheckd.codec import chunk_plan
from fastcheckd.codec.chunk_plan import layout_of, opaque, parse_layout
from fastcheckd.codec.dtypes import BY_NAME, DType
from fastcheckd.errors import InvalidRequestError

U32 = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1))
FLOATS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -1.0, math.nan, math.inf]), st.floats())


@st.composite
def layouts(draw):
    layout = pb.StateLayout(schema=draw(st.sampled_from([LAYOUT_SCHEMA] * 9 + [0, 2])))
    for _ in range(draw(st.integers(0, 3))):
        chunk = layout.chunks.add(bytes=draw(st.one_of(st.integers(0, 200), U32)))
        for _ in range(draw(st.integers(0, 4))):
            chunk.runs.add(
                offset=draw(U32), elements=draw(U32), dtype=draw(st.sampled_from([*BY_NAME, "float8", ""])),
                role=draw(st.integers(0, 9)), unit=draw(st.integers(0, 2)), optimizer_step=draw(st.integers(0, 2)),
                row_elements=draw(U32),
            )  # fmt: skip
    for _ in range(draw(st.integers(0, 2))):
        layout.optimizer_steps.add(lr=draw(FLOATS), step=draw(st.integers(0, 2**64 - 1)))
    if draw(st.booleans()):
        layout.precision.weights_bound = draw(FLOATS)
    return layout


@settings(max_examples=500)
@given(layout=layouts(), data=st.data())
def test_any_layout_is_taken_or_refused(layout, data):
    size = sum(chunk.bytes for chunk in layout.chunks)
    size = data.draw(st.sampled_from([size] * 9 + [0, size + 1, 2**64 - 1]))
    try:
        plans = parse_layout(layout, size)
    except InvalidRequestError as error:
        assert "defect of the SDK" in str(error)
        return
    if layout.schema != LAYOUT_SCHEMA:
        assert plans == ()
        return
    assert [plan.bytes for plan in plans] == [chunk.bytes for chunk in layout.chunks]
    assert sum(plan.bytes for plan in plans) == size
    for plan, chunk in zip(plans, layout.chunks, strict=True):
        assert 0 < plan.bytes <= CHUNK_LENGTH_MAX
        runs = sorted(
            (run for unit in plan.units for run in unit.runs), key=lambda run: (run.offset, run.stop)
        )
        assert len(runs) == len(chunk.runs)
        at = 0
        for run in runs:
            assert run.offset >= at
            assert run.offset % run.dtype.bytes == 0
            at = run.stop
        assert at <= plan.bytes
        assert all(len({run.elements for run in unit.runs}) == 1 for unit in plan.units)


def layout(*runs, size=4096, steps=1, **fields):
    chunk = pb.ChunkLayout(bytes=size, runs=[pb.Run(**({"dtype": "float32"} | run)) for run in runs])
    return pb.StateLayout(
        schema=LAYOUT_SCHEMA, chunks=[chunk], optimizer_steps=[pb.OptimizerStep(lr=1)] * steps, **fields
    )


REFUSED = {
    "together": layout(size=4095),
    "not from 1 byte": pb.StateLayout(
        schema=LAYOUT_SCHEMA, chunks=[pb.ChunkLayout(bytes=4096), pb.ChunkLayout(bytes=0)]
    ),
    "not known": layout({"dtype": "float8_e4m3fn"}),
    "overlap": layout({"offset": 64, "elements": 16}, {"offset": 124, "elements": 1}),
    "out of order": layout({"offset": 64, "elements": 1}, {"offset": 0, "elements": 1}),
    "not aligned": layout({"offset": 2, "elements": 1}),
    "longer than its chunk": layout({"offset": 4092, "elements": 2}),
    "longer than its": layout({"offset": 0, "elements": 2**32 - 1, "dtype": "float64"}),
    "optimizer step that is not there": layout({"optimizer_step": 2}),
    "differ in length": layout({"unit": 1, "elements": 4}, {"unit": 1, "elements": 5, "offset": 16}),
    "weights_bound": layout(precision=pb.Precision(weights_bound=math.nan)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_malformed_layout_says_what_is_wrong(why):
    with pytest.raises(InvalidRequestError, match=why):
        parse_layout(REFUSED[why], 4096)


def test_a_chunk_of_more_than_16_mib_is_refused():
    size = CHUNK_LENGTH_MAX
    assert parse_layout(layout(size=size), size)[0].bytes == size
    with pytest.raises(InvalidRequestError, match="16 MiB"):
        parse_layout(layout(size=size + 1), size + 1)


def test_units_gather_their_runs_and_know_their_step():
    (plan,) = parse_layout(
        layout(
            {"offset": 0, "elements": 4, "unit": 7, "role": pb.ROLE_PARAM, "optimizer_step": 1},
            {"offset": 16, "elements": 3},
            {"offset": 64, "elements": 4, "unit": 7, "role": pb.ROLE_EXP_AVG, "optimizer_step": 1},
            {"offset": 128, "elements": 6, "row_elements": 2, "dtype": "bool"},
        ),
        4096,
    )
    assert [len(unit.runs) for unit in plan.units] == [2, 1, 1]
    assert plan.units[0].step == pb.OptimizerStep(lr=1)
    assert plan.units[1].step is None
    assert plan.units[2].runs[0].dtype == DType.BYTES
    assert plan.units[2].runs[0].row_elements == 2
    assert plan.precision is None


def test_known_chunks_are_planned_with_the_steps_of_today():
    first = layout({"elements": 4, "optimizer_step": 1}, {"offset": 64, "elements": 2})
    (before,) = parse_layout(first, 4096)
    message = pb.StateLayout.FromString(first.SerializeToString())
    message.optimizer_steps[0].lr = 7
    message.precision.momentum = pb.MOMENTUM_CODING_INDEX8
    (plan,) = parse_layout(message, 4096)
    assert [unit.step and unit.step.lr for unit in before.units] == [1, None]
    assert [unit.step and unit.step.lr for unit in plan.units] == [7, None]
    assert before.precision is None
    assert plan.precision == message.precision
    assert plan.units[0].runs is before.units[0].runs, "checked anew"
    del message.optimizer_steps[:]
    with pytest.raises(InvalidRequestError, match="step that is not there"):
        parse_layout(message, 4096)


def test_a_chunk_known_to_be_bad_is_refused_again():
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="overlap"):
            parse_layout(REFUSED["overlap"], 4096)


def test_what_is_known_of_chunks_is_bounded(monkeypatch):
    known = chunk_plan._Known()
    monkeypatch.setattr(chunk_plan, "_known", known)
    monkeypatch.setattr(chunk_plan, "KNOWN_MAX", 10)
    for size in range(1, 20):
        parse_layout(layout({"elements": 1, "dtype": "bool"}, size=size), size)
        assert sum(1 + sum(len(runs) for runs, _ in c.units) for c in known._chunks.values()) == known._size
    assert known._size == 10
    large = layout(*({"offset": at, "elements": 1, "dtype": "bool"} for at in range(20)))
    assert len(parse_layout(large, 4096)[0].units) == 20
    assert known._size <= 10


def test_a_layout_of_another_schema_is_no_plan():
    assert parse_layout(pb.StateLayout(schema=LAYOUT_SCHEMA + 1), 10) == ()


def test_an_opaque_chunk_has_no_units():
    assert opaque(10).bytes == 10
    assert opaque(10).units == ()


@settings(max_examples=500)
@given(layout=layouts())
def test_a_plan_tells_the_layout_that_it_was_made_of(layout):
    try:
        plans = parse_layout(layout, sum(chunk.bytes for chunk in layout.chunks))
    except InvalidRequestError:
        return
    for plan in plans:
        told, steps = layout_of(plan)
        (again,) = parse_layout(told, plan.bytes)
        assert (
            layout_of(again)[0].SerializeToString() == told.SerializeToString()
        )  # NaN is not equal to itself
        assert (again.bytes, len(again.units)) == (plan.bytes, len(plan.units))
        for unit, before in zip(again.units, plan.units, strict=True):
            assert unit.runs == before.runs
            number = next((i for i, step in enumerate(steps) if step is before.step), None)
            assert (unit.step is None) == (number is None)
            if number is not None:
                assert unit.step.SerializeToString() == steps[number].SerializeToString()
        assert (again.precision is None) == (plan.precision is None)
