"""Chunks encoded by earlier versions, on other machines, decode here; predictions have the same bits here as there."""

import os
import subprocess
import sys

import pytest
from codec_helpers import decoded
from make_vectors import FOLDER, HEAD, inputs, predictions
from numpy._core import _multiarray_umath as umath

from fastcheckd.codec.decoder import read_header
from fastcheckd.codec.format import CodecId, parse
from fastcheckd.digests import chunk_digest

VECTORS = sorted(FOLDER.glob("*.bin"))


def parts(path):
    data = path.read_bytes()
    base_bytes, digest = HEAD.unpack(data[: HEAD.size])
    base = data[HEAD.size : HEAD.size + base_bytes]
    return base or None, data[HEAD.size + base_bytes :], digest


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_a_stored_chunk_decodes(path):
    base, payload, digest = parts(path)
    assert chunk_digest(decoded(payload, base, read_header(payload).raw_bytes)) == digest


def test_every_codec_has_a_stored_chunk_and_units_both_ways():
    sections = [section for path in VECTORS for section in parse(parts(path)[1])[1]]
    assert {s.codec for s in sections} == set(CodecId)
    for codec in (CodecId.DELTA, CodecId.ADAM, CodecId.SGD):
        assert {s.flags for s in sections if s.codec == codec} == {0, 1}


def test_predictions_have_the_stored_bits():
    lines = (FOLDER / "predictions.txt").read_text().splitlines()
    stored = {name: digest for digest, name in (line.split(" ", 1) for line in lines)}
    assert {name: digest.hex() for name, digest in {**inputs(), **predictions()}.items()} == stored


def test_predictions_have_the_stored_bits_on_a_lesser_cpu():
    # numpy has a kernel for each generation of CPU; without these it takes the oldest.
    newer = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name]]
    if not newer:
        pytest.skip("numpy uses its oldest kernels on this CPU anyway: the test above is the same one")
    code = "from make_vectors import predictions\nfor n, d in predictions().items(): print(d.hex(), n)"
    environment = os.environ | {
        "NPY_DISABLE_CPU_FEATURES": " ".join(newer),
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    stored = (FOLDER / "predictions.txt").read_text().splitlines()
    assert len(done.stdout.splitlines()) > 10
    assert set(done.stdout.splitlines()) < set(stored)


def test_the_stored_files_stay_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 200_000
