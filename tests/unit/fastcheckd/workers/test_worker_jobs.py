"""Jobs and answers as bytes: what is malformed is refused, and no job reaches a file outside of the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.chunks import CHUNK_LENGTH_MAX
from fastcheckd.codec.chunk_plan import opaque
from fastcheckd.codec.encoder import Use
from fastcheckd.codec.fitting import Fits
from fastcheckd.codec.format import CodecId
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import InvalidRequestError
from fastcheckd.store.segments import Place, Segment
from fastcheckd.workers.jobs import (
    ANSWER_BYTES,
    FITS_MAX,
    JOB_BYTES,
    OUT_AT,
    PART_BYTES_MAX,
    SCRATCH_BYTES,
    Answer,
    Job,
    JobKind,
    Status,
    pack_answer,
    pack_job,
    pack_plan,
    pack_uses,
    parse_answer,
    parse_job,
    parse_plan,
    parse_uses,
)
from fastcheckd.workers.process import answer_to

NAME = "0123456789abcdef" * 2 + ".seg"
CHUNK = Place(NAME, 4096 + 64, 1000)
ALONE = Job(JobKind.ENCODE_ALONE, new=CHUNK, step=7, digest=bytes(range(16)))


def changed(job: Job, **fields: object) -> Job:
    return Job(**{name: getattr(job, name) for name in Job.__slots__} | fields)


@pytest.mark.parametrize(
    "job",
    [
        ALONE,
        Job(JobKind.ENCODE, CHUNK, None, None, 2**64 - 1, 0, bytes([1] * 16), in_bytes=9, fits=FITS_MAX),
        Job(JobKind.ENCODE, CHUNK, Place(NAME, 0, 1000), step=3, base_step=2, base_digest=bytes([2] * 16), in_bytes=1),
        Job(JobKind.DECODE, out=CHUNK, in_bytes=PART_BYTES_MAX),
        Job(JobKind.APPLY, base=Place(NAME, 8, CHUNK_LENGTH_MAX), out=Place(NAME, 0, CHUNK_LENGTH_MAX), in_bytes=5),
    ],
)  # fmt: skip
def test_a_job_comes_back_as_it_was(job: Job) -> None:
    assert parse_job(pack_job(job)) == job


@pytest.mark.parametrize(
    "job",
    [
        changed(ALONE, new=None),
        changed(ALONE, out=CHUNK),
        changed(ALONE, in_bytes=1),
        changed(ALONE, new=Place("../" + NAME[3:], 0, 1000)),
        changed(ALONE, new=Place(NAME[:-4] + "/seg", 0, 1000)),
        changed(ALONE, new=Place(NAME, 0, 0)),
        changed(ALONE, new=Place(NAME, 0, CHUNK_LENGTH_MAX + 1)),
        changed(ALONE, new=Place(NAME, 2**63, 1000)),
        Job(JobKind.ENCODE, new=CHUNK, base=Place(NAME, 0, 999), in_bytes=1),
        Job(JobKind.ENCODE, new=CHUNK),
        Job(JobKind.ENCODE, new=CHUNK, in_bytes=PART_BYTES_MAX + 1),
        Job(JobKind.ENCODE, new=CHUNK, in_bytes=1, fits=FITS_MAX + 1),
        Job(JobKind.APPLY, out=CHUNK, in_bytes=1),
        Job(JobKind.DECODE, new=CHUNK, in_bytes=1),
    ],
)
def test_a_bad_job_is_refused(job: Job) -> None:
    with pytest.raises(InvalidRequestError):
        parse_job(pack_job(job))


@given(noise=st.binary(min_size=JOB_BYTES, max_size=JOB_BYTES), whole=st.booleans())
def test_noise_is_no_job(noise: bytes, whole: bool) -> None:
    data = noise if whole else b"FCJ1" + noise[4:]
    with pytest.raises(InvalidRequestError):
        parse_job(data)


def test_answers_come_back_and_are_bounded() -> None:
    answer = Answer(Status.DONE, PART_BYTES_MAX, 3, 2, 10**12)
    assert parse_answer(pack_answer(answer)) == answer
    for bad in (
        Answer(Status.DONE, PART_BYTES_MAX + 1),
        Answer(Status.DONE, 0, 4097),
        Answer(Status.DONE, 0, 0, FITS_MAX + 1),
    ):
        with pytest.raises(InvalidRequestError):
            parse_answer(pack_answer(bad))
    with pytest.raises(InvalidRequestError):
        parse_answer(bytes(ANSWER_BYTES))
    with pytest.raises(InvalidRequestError):
        parse_answer(pack_answer(answer)[:4] + b"\xff" + pack_answer(answer)[5:])


def test_uses_of_every_codec_come_back() -> None:
    uses = tuple(Use(codec.label, 7, 5) for codec in CodecId)
    assert parse_uses(pack_uses(uses), len(uses)) == uses
    with pytest.raises(InvalidRequestError):
        parse_uses(b"\xff" * 9, 1)


@given(noise=st.binary(max_size=200), fits=st.integers(0, 3))
def test_noise_is_no_plan(noise: bytes, fits: int) -> None:
    told, steps = pack_plan(opaque(1000), Fits())
    assert parse_plan(told, len(steps))[0] == opaque(1000)
    for bad in (noise, told[:-1], told + b"x", told[:4] + noise):
        if bad != told:
            with pytest.raises(InvalidRequestError):
                parse_plan(bad, fits)


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    segment = Segment.create(tmp_path, 2 * 4096, "copy")
    segment.view[:] = bytes(2 * 4096)
    return segment


def ask(folder: Path, place: Place) -> tuple[Answer, str]:
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    digest = chunk_digest(bytes(place.size))
    job = Job(JobKind.ENCODE_ALONE, new=place, step=1, digest=digest)
    answer = answer_to(pack_job(job), folder, scratch)
    return answer, bytes(scratch[OUT_AT : OUT_AT + answer.out_bytes]).decode(errors="replace")


def test_a_place_outside_of_its_segment_is_refused(tmp_path: Path, segment: Segment) -> None:
    assert ask(tmp_path, Place(segment.name, 4096, 4096))[0].status == Status.DONE
    for offset, size in ((4097, 4096), (8192, 1), (2**40, 1000), (2**62, 1000)):
        answer, why = ask(tmp_path, Place(segment.name, offset, size))
        assert answer.status == Status.REFUSED and "not within" in why


def test_only_regular_files_of_the_folder_are_opened(tmp_path: Path, segment: Segment) -> None:
    (tmp_path / NAME).symlink_to(segment.path)
    assert ask(tmp_path, Place(NAME, 0, 4096))[0].status == Status.REFUSED
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    assert ask(tmp_path, Place(NAME, 0, 4096))[0].status == Status.REFUSED
    answer, why = ask(tmp_path, Place("f" * 32 + ".seg", 0, 4096))
    assert answer.status == Status.REFUSED and "missing" in why


def test_a_plan_for_another_size_is_refused(tmp_path: Path, segment: Segment) -> None:
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    told, _ = pack_plan(opaque(4000), Fits())
    scratch[: len(told)] = told
    job = Job(JobKind.ENCODE, new=Place(segment.name, 0, 4096), in_bytes=len(told))
    assert answer_to(pack_job(job), tmp_path, scratch).status == Status.REFUSED


def test_chunks_are_read_through_a_mapping_that_cannot_write(tmp_path: Path, segment: Segment) -> None:
    before = np.frombuffer(segment.view, np.uint8).copy()
    segment.path.chmod(0o400)
    assert ask(tmp_path, Place(segment.name, 64, 4096))[0].status == Status.DONE
    assert np.array_equal(before, np.frombuffer(segment.view, np.uint8))
