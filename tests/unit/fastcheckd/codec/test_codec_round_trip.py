"""Whatever is encoded comes back bit for bit: forth, back, and forth again; as a whole and by range."""

import threading

import numpy as np
import pytest
from codec_helpers import (
    FILLS,
    LOW,
    PARAM,
    SPECIALS,
    Case,
    adam_arrays,
    adam_step,
    adam_unit,
    based,
    cases,
    check_range,
    decoded,
    encode_chunk,
    fill,
    gaussian,
    joined,
    noise,
    round_trip,
    run,
    sgd_arrays,
    sgd_step,
    sgd_unit,
    single,
    whole,
)  # fmt: skip
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastcheckd.codec.chunk_plan import ChunkPlan, Unit, opaque
from fastcheckd.codec.decoder import decode, reverse
from fastcheckd.codec.dtypes import BY_NAME, DType
from fastcheckd.codec.encoder import unchanged
from fastcheckd.codec.scratch import BLOCK
from fastcheckd.digests import chunk_digest

SLOW_INPUTS = settings(
    max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@SLOW_INPUTS
@given(case=cases())
@example(case=Case(opaque(1), b"\0", None))
@example(case=Case(opaque(1), b"x", b"y"))
def test_any_chunk_comes_back(case):
    round_trip(case.new, case.base, case.plan)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), data=st.data())
def test_any_range_is_that_of_the_chunk(case, data):
    encoded = encode_chunk(case.new, case.base, case.plan)
    if encoded is None:
        return
    start = data.draw(st.integers(0, len(case.new)))
    stop = data.draw(st.integers(start, len(case.new)))
    check_range(encoded.payload, case.base, case.new, start, stop)


@pytest.mark.parametrize("kind", ["none", "equal", "row", "random", "near", "zeros"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_dtype_against_every_base(name, kind):
    dtype = BY_NAME[name]
    rng = np.random.default_rng(len(name) * 7 + len(kind))
    for n in (1, 65, 3000):
        new = b"".join(fill(dtype, n, part, rng) for part in FILLS)
        round_trip(new, based(new, kind, rng), single(n * len(FILLS), dtype, rows=20))


@pytest.mark.parametrize("n", [1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
def test_sizes_around_a_block(n):
    new, old = gaussian(n, 3), gaussian(n, 3) * np.float32(1.0001)
    round_trip(new.tobytes(), old.tobytes(), single(n))
    round_trip(new.tobytes(), None, single(n))
    for step in (adam_step(), adam_step(amsgrad=True)):
        older, newer = adam_arrays(n, step)
        round_trip(joined(newer), joined(older), whole(adam_unit(n, step)))
    older, newer = sgd_arrays(n, sgd_step())
    round_trip(joined(newer), joined(older), whole(sgd_unit(n, sgd_step())))


def test_a_residual_that_grows_late_has_its_planes_filled_from_the_start():
    n = 3 * BLOCK
    old = np.zeros(n, np.int32)
    new = np.ones(n, np.int32)
    new[2 * BLOCK] = 1 << 30
    assert round_trip(new.tobytes(), old.tobytes(), single(n, DType.INT32)) == {"delta"}


def test_every_codec_is_chosen_where_it_belongs():
    n = 4096
    w = gaussian(n, 1)
    near = w + np.float32(1e-6) * gaussian(n, 2)
    assert round_trip(noise(n), None, opaque(n)) == set()  # the chunk travels raw, as it is
    mixture = ChunkPlan(8 * n, (Unit((run(0, n),)), Unit((run(4 * n, n),))))
    assert round_trip(noise(4 * n) + bytes(4 * n), None, mixture) == {"raw", "planes"}
    assert round_trip(w.tobytes(), w.tobytes(), single(n)) == {"same"}
    assert round_trip(w.tobytes(), None, single(n)) == {"planes"}
    assert round_trip(near.tobytes(), w.tobytes(), single(n)) == {"delta"}
    sparse = w.copy()
    sparse[640:704] = 1
    sparse[-64:] = gaussian(64, 9)
    assert round_trip(sparse.tobytes(), w.tobytes(), single(n, rows=64)) == {"rows"}
    for step in (adam_step(), adam_step(amsgrad=True)):
        older, newer = adam_arrays(n, step)
        assert round_trip(joined(newer), joined(older), whole(adam_unit(n, step))) == {"adam"}
    for step in (sgd_step(), sgd_step(nesterov=True)):
        older, newer = sgd_arrays(n, step)
        assert round_trip(joined(newer), joined(older), whole(sgd_unit(n, step))) == {"sgd"}
    bf16 = (w.view(np.uint32) >> 16).astype(np.uint16)
    truncated = (bf16.astype(np.uint32) << 16).view(np.float32)
    unit = Unit((run(0, n, DType.BFLOAT16, LOW), run(2 * n, n, role=PARAM)))
    assert "rounded" in round_trip(bf16.tobytes() + truncated.tobytes(), None, whole(unit))
    assert "rounded" in round_trip(bf16.tobytes() + truncated.tobytes(), bytes(6 * n), whole(unit))


def test_specials_survive_in_every_role_of_a_predicted_unit():
    n, step = 5000, adam_step(amsgrad=True)
    specials = np.array(SPECIALS[DType.FLOAT32], np.uint32).view(np.float32)
    for member in range(4):
        older, newer = adam_arrays(n, step)
        for arrays in (older, newer):
            arrays[member][: len(specials) * 3] = np.tile(specials, 3)
        assert round_trip(joined(newer), joined(older), whole(adam_unit(n, step))) == {"adam"}
    for member in range(2):
        older, newer = sgd_arrays(n, sgd_step())
        for arrays in (older, newer):
            arrays[member][: len(specials) * 3] = np.tile(specials, 3)
        assert round_trip(joined(newer), joined(older), whole(sgd_unit(n, sgd_step()))) == {"sgd"}


def test_all_pairs_of_special_values_have_a_difference_that_comes_back():
    for dtype, patterns in SPECIALS.items():
        bits = np.array(patterns, f"u{dtype.bytes}")
        new, old = np.repeat(bits, len(bits)), np.tile(bits, len(bits))
        # Beside much that compresses, so that the section is worth its header.
        pad = np.zeros(4000, bits.dtype)
        plan = single(len(new) + 4000, dtype)
        assert round_trip(np.append(pad, new).tobytes(), np.append(pad, old).tobytes(), plan) == {"delta"}


def test_runs_without_elements_are_no_sections():
    runs = (run(0, 0, role=PARAM), run(0, 0, DType.BFLOAT16, LOW), run(64, 0), run(100, 0))
    plan = ChunkPlan(100, (Unit(runs, adam_step()),))
    encoded = encode_chunk(bytes(5000), None, ChunkPlan(5000, plan.units))
    assert decoded(encoded.payload, None, 5000) == bytes(5000)


@pytest.mark.parametrize("shift", range(8))
def test_buffers_at_odd_addresses(shift):
    n = 3000
    older, newer = adam_arrays(n, adam_step())
    plan = whole(adam_unit(n, adam_step()))

    def moved(data):
        return memoryview(bytes(shift) + data)[shift:]

    new, base = moved(joined(newer)), moved(joined(older))
    encoded = encode_chunk(new, base, plan)
    assert encoded.payload == encode_chunk(bytes(new), bytes(base), plan).payload
    out = memoryview(bytearray(shift + plan.bytes))[shift:]
    decode(moved(encoded.payload), base, out)
    assert out == new
    back = reverse(moved(encoded.payload), base, new)
    decode(moved(back), new, out)
    assert out == base


def test_read_only_memory_is_enough_for_all_but_the_outcome():
    w = gaussian(4000, 1)
    new, base = w.tobytes(), (w * np.float32(1.0001)).tobytes()
    encoded = encode_chunk(memoryview(new).toreadonly(), memoryview(base).toreadonly(), single(4000))
    assert decoded(memoryview(encoded.payload).toreadonly(), memoryview(base).toreadonly(), len(new)) == new


def test_an_encoding_keeps_nothing_of_the_working_memory():
    plan = single(20000)
    inputs = [gaussian(20000, salt) for salt in range(4)]
    alone = [encode_chunk(a.tobytes(), None, plan).payload for a in inputs]
    for a, payload in zip(inputs, alone, strict=True):
        assert decoded(payload, None, plan.bytes) == a.tobytes()


def test_eight_threads_do_what_one_does():
    steps = [adam_step(), adam_step(amsgrad=True), sgd_step(), sgd_step(nesterov=True)] * 2
    work = []
    for index, step in enumerate(steps):
        adam = step.kind != sgd_step().kind
        n = BLOCK + 100 * index
        older, newer = (adam_arrays if adam else sgd_arrays)(n, step, index)
        work.append((joined(newer), joined(older), whole((adam_unit if adam else sgd_unit)(n, step))))

    def outcome(new, base, plan):
        payload = encode_chunk(new, base, plan).payload
        assert decoded(payload, base, plan.bytes) == new
        return payload, reverse(payload, base, new)

    expected = [outcome(*item) for item in work]
    found = [None] * 8
    start = threading.Barrier(8)

    def worker(index):
        start.wait()
        for turn in range(8):
            item = (index + turn) % 8
            assert outcome(*work[item]) == expected[item]
        found[index] = True

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(found)


def test_a_reverse_delta_that_does_not_shrink_is_bounded():
    n = 30000
    new, base = bytes(n), noise(n)
    payload = encode_chunk(new, base, opaque(n)).payload
    back = reverse(payload, base, new)
    assert n < len(back) <= n + 1024
    assert decoded(back, new, n) == base


def test_a_reverse_delta_that_would_lead_elsewhere_is_none():
    n = 20000
    base, new = gaussian(n, 1), gaussian(n, 1) * np.float32(1.0001)
    payload = encode_chunk(new.tobytes(), base.tobytes(), single(n)).payload
    flipped = bytearray(new.tobytes())
    flipped[5000] ^= 1  # not what the payload decodes to
    assert reverse(payload, base.tobytes(), bytes(flipped)) is None
    assert len(reverse(payload, base.tobytes(), new.tobytes())) < base.nbytes


def test_an_unchanged_chunk_both_ways():
    data = noise(1 << 20)
    encoded = unchanged(len(data), step=8, base_step=7, digest=chunk_digest(data))
    assert len(encoded.payload) == 128
    assert decoded(encoded.payload, data, len(data)) == data
    assert decoded(reverse(encoded.payload, data, data), data, len(data)) == data


def test_the_reverse_delta_of_changed_rows_is_as_small_as_the_way_forth():
    rows, width = 1000, 64
    base = gaussian(rows * width, 5)
    new = base.copy()
    new[64:128] = np.frombuffer(noise(256, 3), np.float32)
    payload = encode_chunk(new.tobytes(), base.tobytes(), single(rows * width, rows=width)).payload
    back = reverse(payload, base.tobytes(), new.tobytes())
    assert len(payload) < 1000
    assert len(back) < 1000
    assert decoded(back, new.tobytes(), base.nbytes) == base.tobytes()
