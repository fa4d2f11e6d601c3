"""Adam and SGD: constants from hyper-parameters of any kind, the rate from the numbers, units that are none."""

import math

import numpy as np
import pytest
from codec_helpers import (
    LOW,
    MOMENTUM,
    PARAM,
    M,
    V,
    adam_arrays,
    adam_step,
    adam_unit,
    decoded,
    joined,
    noise,
    round_trip,
    run,
    sgd_arrays,
    sgd_step,
    sgd_unit,
    whole,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec import adam, sgd
from fastcheckd.codec.chunk_plan import ChunkPlan, Unit
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.encoder import encode
from fastcheckd.codec.fit import Fits, fit_adam_lr, fit_sgd_lr
from fastcheckd.digests import chunk_digest

N = 2000
ODD = [0.0, -0.0, 1.0, 0.9, 5e-324, 1e-308, 1 - 2**-53, 1e30, -1e30, 1.7e308, math.nan, math.inf, -math.inf]
FLOATS = st.one_of(st.sampled_from(ODD), st.floats())


@settings(max_examples=300)
@given(
    kind=st.sampled_from(pb.OptimizerKind.values()),
    floats=st.lists(FLOATS, min_size=7, max_size=7),
    flags=st.lists(st.booleans(), min_size=3, max_size=3),
    count=st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1)),
)
def test_hyper_parameters_of_any_kind_break_nothing(kind, floats, flags, count):
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening")
    step = pb.OptimizerStep(
        kind=kind, nesterov=flags[0], maximize=flags[1], amsgrad=flags[2], step=count,
        **dict(zip(names, floats, strict=True)),
    )  # fmt: skip
    real = adam_step(amsgrad=True)
    older, newer = adam_arrays(N, real)
    round_trip(joined(newer), joined(older), whole(Unit(adam_unit(N, real).runs, step)))
    older, newer = sgd_arrays(N, sgd_step())
    round_trip(joined(newer), joined(older), whole(sgd_unit(N, step)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta1": 1.0}, {"beta1": -0.1}, {"beta2": 1.0}, {"beta2": 0.0}, {"beta1": math.nan}, {"step": 0},
        {"eps": -1.0}, {"eps": math.nan}, {"lr": math.inf}, {"lr": 1e38}, {"lr": 1.0, "weight_decay": 1.0},
    ],
)  # fmt: skip
def test_hyper_parameters_without_sense_make_no_constants(wrong):
    assert adam.AdamConstants.of(adam_step()) is not None
    assert adam.AdamConstants.of(adam_step(**wrong)) is None


def test_sgd_hyper_parameters_without_sense_make_no_constants():
    assert sgd.SgdConstants.of(sgd_step()) == sgd.SgdConstants(0.05, 0.0)
    assert sgd.SgdConstants.of(sgd_step(lr=math.nan)) is None
    assert sgd.SgdConstants.of(sgd_step(nesterov=True, dampening=1.0)) is None
    assert sgd.SgdConstants.of(sgd_step(nesterov=True, dampening=1 - 2**-53, lr=1e300)) is None


@pytest.mark.parametrize("lr", [1e-6, 1e-3, 0.5])
def test_the_rate_is_found_in_the_numbers(lr):
    for changes in ({}, {"amsgrad": True}, {"kind": pb.OPTIMIZER_KIND_ADAM}):
        step = adam_step(lr=lr, **changes)
        older, newer = adam_arrays(N, step)
        runs = adam.AdamRuns.of(adam_unit(N, step))
        assert fit_adam_lr(runs, step, joined(newer), joined(older)) == pytest.approx(lr, rel=1e-2)
    for changes in ({}, {"nesterov": True}, {"dampening": 0.2}):
        step = sgd_step(lr=lr, **changes)
        older, newer = sgd_arrays(N, step)
        found = fit_sgd_lr(sgd.SgdRuns.of(sgd_unit(N, step)), step, joined(newer), joined(older))
        assert found == pytest.approx(lr, rel=1e-2)


def test_numbers_that_tell_no_rate():
    step = adam_step()
    runs = adam.AdamRuns.of(adam_unit(N, step))
    size = 12 * N
    nan = np.full(3 * N, np.nan, np.float32).tobytes()
    assert fit_adam_lr(runs, step, bytes(size), bytes(size)) is None
    assert fit_adam_lr(runs, step, nan, nan) is None
    assert fit_sgd_lr(sgd.SgdRuns.of(sgd_unit(N, sgd_step())), sgd_step(), nan, nan) is None


def test_chunks_of_one_save_share_what_was_fitted():
    right, moved, fits = adam_step(), adam_step(lr=0.7), Fits()
    assert fits.known(moved) is None
    for salt in (1, 9):
        older, newer = adam_arrays(N, right, salt)
        digests = {"digest": chunk_digest(joined(newer)), "base_digest": chunk_digest(joined(older))}
        plan = whole(adam_unit(N, moved))
        encoded = encode(joined(newer), joined(older), plan, step=8, base_step=7, fits=fits, **digests)
        assert {use.codec for use in encoded.uses} == {"adam"}
        assert decoded(encoded.payload, joined(older), plan.bytes) == joined(newer)
        assert fits.known(moved) == pytest.approx(right.lr, rel=1e-3)
    # Another group's step is another matter, equal or not.
    assert fits.known(adam_step(lr=0.7)) is None


def test_a_step_that_no_rate_explains_is_given_up_after_some_chunks():
    step, fits = adam_step(), Fits()
    tried = 0
    while fits.worth_trying(step):
        new, base = noise(12 * N, tried), noise(12 * N, tried + 1)
        encode(
            new,
            base,
            whole(adam_unit(N, step)),
            step=8,
            base_step=7,
            digest=bytes(16),
            base_digest=b"b" * 16,
            fits=fits,
        )
        tried += 1
        assert tried <= 3
    assert tried == 3


def test_units_that_are_none_are_coded_run_by_run():
    step = adam_step()
    older, newer = adam_arrays(N, step)
    new, base = joined(newer), joined(older)
    w, m, v = adam_unit(N, step).runs
    for runs, other_step in [
        ((w, m), step), ((w, v), step), ((m, v), step), ((w, m, v), None), ((w, m, v), sgd_step()),
        ((w, m, v), adam_step(amsgrad=True)), ((w, m, v), pb.OptimizerStep()),
        ((run(0, 2 * N, DType.FLOAT16, PARAM), run(4 * N, 2 * N, DType.FLOAT16, M),
          run(8 * N, 2 * N, DType.FLOAT16, V)), step),
    ]:  # fmt: skip
        assert not {"adam", "sgd"} & round_trip(new, base, ChunkPlan(12 * N, (Unit(runs, other_step),)))


def test_a_unit_keeps_its_other_runs():
    step = adam_step()
    older, newer = adam_arrays(N, step)
    extra = noise(2 * N)
    unit = adam_unit(N, step)
    runs = (
        *unit.runs,
        run(12 * N, N, DType.BFLOAT16, LOW),
        run(14 * N, N, DType.INT16),
        run(16 * N, N, DType.INT8),
    )
    new, base = joined(newer) + extra + bytes(3 * N), joined(older) + bytes(2 * N) + extra + bytes(N)
    assert round_trip(new, base, ChunkPlan(17 * N, (Unit(runs, step),))) == {"adam", "raw", "planes", "same"}


def test_runs_of_a_unit_may_lie_in_any_order_with_anything_between():
    step = sgd_step()
    older, newer = sgd_arrays(N, step)
    unit = Unit((run(40, N, role=MOMENTUM), run(4 * N + 80, N, role=PARAM)), step)

    def laid(arrays, between):
        w, b = (a.tobytes() for a in arrays)
        return between + b + between + w + between

    new, base = laid(newer, noise(40)), laid(older, noise(40, 1))
    assert round_trip(new, base, ChunkPlan(len(new), (unit,))) == {"sgd", "raw"}


@pytest.mark.parametrize("n", [1, 2, 3, 100])
def test_a_unit_is_predicted_where_that_is_worth_its_header(n):
    older, newer = adam_arrays(n, adam_step())
    plan = ChunkPlan(12 * n + 1000, (adam_unit(n, adam_step()),))
    assert ("adam" in round_trip(joined(newer) + bytes(1000), joined(older) + bytes(1000), plan)) == (
        n == 100
    )


def test_a_unit_that_is_next_to_nothing_in_its_chunk_is_not_worth_the_time():
    older, newer = adam_arrays(100, adam_step())
    plan = ChunkPlan(1 << 20, (adam_unit(100, adam_step()),))
    rest = (1 << 20) - 1200
    assert round_trip(joined(newer) + bytes(rest), joined(older) + bytes(rest), plan) == {"raw"}


def test_a_frozen_parameter_costs_nothing():
    older, _ = adam_arrays(N, adam_step())
    assert round_trip(joined(older), joined(older), whole(adam_unit(N, adam_step()))) == {"same"}
