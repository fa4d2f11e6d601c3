"""Mapped files: they begin where large pages can, show the file and nothing else, and go when they are let go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastcheck.segments import map_file
from fastcheck_proto.v1 import trainer_pb2 as pb

LARGE_PAGE_BYTES = 2 << 20
SIZE_BYTES = 5 * 4096


@pytest.fixture
def ref(tmp_path):
    path = tmp_path / "one.seg"
    path.write_bytes(bytes(range(1, 251)) * (SIZE_BYTES // 250) + b"\7" * (SIZE_BYTES % 250))
    return pb.SegmentRef(path=str(path), bytes=SIZE_BYTES)


def mappings_of(path: str) -> int:
    return Path("/proc/self/maps").read_text().count(path)


@pytest.mark.parametrize("private", [True, False])
def test_a_mapping_shows_the_file_from_a_large_page_on(ref, private):
    segment = map_file(ref, private=private)
    assert segment.tensor.data_ptr() % LARGE_PAGE_BYTES == 0
    assert bytes(segment.tensor.numpy()) == Path(ref.path).read_bytes()
    segment.write(4097, b"new")
    assert bytes(segment.tensor[4097:4100].numpy()) == b"new"
    with Path(ref.path).open("rb") as file:
        assert (os.pread(file.fileno(), 3, 4097) == b"new") is not private


def test_nothing_of_a_released_mapping_stays(ref):
    segment = map_file(ref, private=True)
    assert mappings_of(ref.path)
    assert segment.release()
    assert not mappings_of(ref.path)


def test_a_view_that_outlives_its_mapping_keeps_the_bytes_that_it_had(ref):
    segment = map_file(ref, private=True)
    view = segment.tensor[-10:]
    before = view.clone()
    assert not segment.release()
    with Path(ref.path).open("r+b") as file:
        file.write(b"\0" * SIZE_BYTES)
    assert view.equal(before)
