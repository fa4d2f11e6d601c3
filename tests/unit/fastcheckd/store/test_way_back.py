"""The way-back file by itself: what was appended is read, and nothing else is believed."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheckd.errors import CorruptError, InvalidRequestError, OverBudgetError
from fastcheckd.store import directory
from fastcheckd.store.segment_pools import SegmentPools
from fastcheckd.store.way_back import GROW_BYTES, WayBackFile, record_bytes_max

CHUNK = 4096


@pytest.fixture
def folder(tmp_path):
    for name in ("segments", "ways"):
        (tmp_path / name).mkdir()
    return tmp_path


def make_pools(folder, budget: int = 64 << 20) -> SegmentPools:
    return SegmentPools(folder / "segments", budget)


def read_all(file: WayBackFile) -> list[bytes | None]:
    return [file.read(index, CHUNK) for index in range(file.chunks)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.none() | st.binary(min_size=1, max_size=300), max_size=30))
def test_what_is_appended_is_read(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("way")
    for name in ("segments", "ways"):
        (folder / name).mkdir()
    pools = make_pools(folder)
    file = WayBackFile.make(folder / "ways", pools, len(records))
    for index, record in reversed(list(enumerate(records))):
        if record is not None:
            file.append(pools, index, record, CHUNK)
    assert read_all(file) == records
    assert read_all(WayBackFile.adopt(file.path)) == records
    # Used again, it says nothing of what it said before.
    pools.let_go(file)
    again = WayBackFile.make(folder / "ways", pools, 31)
    assert again is file
    assert read_all(again) == [None] * 31


def test_many_threads_append_at_once(folder):
    pools = make_pools(folder)
    file = WayBackFile.make(folder / "ways", pools, 200)
    records = [bytes([index]) * (1 + 37 * index % 4000) for index in range(200)]

    def work(first):
        for index in range(first, 200, 8):
            file.append(pools, index, records[index], CHUNK)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert read_all(file) == records


def test_it_counts_as_it_grows_and_no_more_once_it_is_settled(folder):
    pools = make_pools(folder)
    file = WayBackFile.make(folder / "ways", pools, 10)
    assert pools.usage().used_bytes == file.size_bytes == GROW_BYTES
    big = bytes(record_bytes_max(GROW_BYTES))
    file.append(pools, 0, big, GROW_BYTES)
    assert file.path.stat().st_size <= file.size_bytes == pools.usage().used_bytes
    file.settle(pools)
    assert 0 <= file.size_bytes - file.path.stat().st_size < 4096
    assert pools.usage().used_bytes == file.size_bytes
    pools.let_go(file)
    assert pools.usage().free_bytes == file.size_bytes
    pools.allocate(64 << 20, "copy")  # goes first when it gets tight
    assert not file.path.exists()


def test_a_recycled_file_is_cut_to_what_the_next_tenant_needs(folder):
    pools = make_pools(folder)
    file = WayBackFile.make(folder / "ways", pools, 8)
    for index in range(8):
        file.append(pools, index, bytes(1 << 20), 1 << 20)
    file.settle(pools)
    pools.let_go(file)
    again = WayBackFile.make(folder / "ways", pools, 8)
    assert again is file
    assert pools.usage().used_bytes >= 8 << 20  # its pages are still there
    again.append(pools, 3, b"little", 1 << 20)
    again.settle(pools)
    assert pools.usage().used_bytes == again.size_bytes == 4096
    assert read_all(again) == [None, None, None, b"little", None, None, None, None]


def test_over_budget_names_nothing(folder):
    pools = make_pools(folder, budget=GROW_BYTES)
    file = WayBackFile.make(folder / "ways", pools, 3)
    file.append(pools, 0, b"fits", GROW_BYTES)
    with pytest.raises(OverBudgetError):
        file.append(pools, 1, bytes(GROW_BYTES), GROW_BYTES)
    assert file.read(1, GROW_BYTES) is None
    file.append(pools, 2, b"small", GROW_BYTES)
    assert file.read(0, GROW_BYTES) == b"fits"
    assert file.read(2, GROW_BYTES) == b"small"
    with pytest.raises(OverBudgetError):
        WayBackFile.make(folder / "ways", pools, 3)
    assert len(list((folder / "ways").iterdir())) == 1
    assert pools.usage().used_bytes == GROW_BYTES


@pytest.mark.parametrize("record", [b"", bytes(record_bytes_max(CHUNK) + 1)])
def test_an_impossible_record_is_refused(folder, record):
    pools = make_pools(folder)
    file = WayBackFile.make(folder / "ways", pools, 1)
    with pytest.raises(InvalidRequestError):
        file.append(pools, 0, record, CHUNK)
    assert file.read(0, CHUNK) is None


def entry(offset: int, length: int) -> bytes:
    return offset.to_bytes(8, "little") + length.to_bytes(4, "little") + bytes(4)


@pytest.mark.parametrize(
    "table",
    [entry(0, 5), entry(47, 5), entry((1 << 64) - 1, 5), entry(48, 0), entry(48, 6000), entry(50, 10)],
    ids=["at 0", "in the table", "far away", "empty", "too large", "beyond the end"],
)
def test_a_table_that_lies_is_not_believed(folder, table):
    pools = make_pools(folder)
    file = WayBackFile.make(folder / "ways", pools, 1)
    file.append(pools, 0, b"0123456789", CHUNK)
    fd = os.open(file.path, os.O_WRONLY)
    os.pwrite(fd, table, 32)
    os.close(fd)
    with pytest.raises(CorruptError):
        file.read(0, CHUNK)


@settings(max_examples=100, deadline=None)
@given(noise=st.binary(max_size=100))
def test_noise_is_no_way_back(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("way") / "x.way"
    directory.write_new(path, noise)
    with pytest.raises(CorruptError):
        WayBackFile.adopt(path)
