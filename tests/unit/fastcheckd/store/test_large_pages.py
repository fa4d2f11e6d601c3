"""Large pages behind new segments: a file has what the kernel gives, and is allocated whole without them too."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from fastcheckd.store import directory, large_pages
from fastcheckd.store.large_pages import LARGE_PAGE_BYTES, allocate_large

SIZE_BYTES = 3 * LARGE_PAGE_BYTES + 5 * 4096


def gives_large_pages() -> bool:
    """Whether MADV_COLLAPSE is there, and the administrator lets files of a tmpfs have it."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


@pytest.fixture
def path():
    """In a tmpfs: nothing else has large pages."""
    with tempfile.TemporaryDirectory(prefix="fastcheck-test-", dir="/dev/shm") as folder:
        yield Path(folder) / "segment"


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.skipif(not gives_large_pages(), reason="this kernel gives no large pages to files of a tmpfs")
def test_a_new_file_has_large_pages_and_zeros_in_them(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        large = allocate_large(fd, SIZE_BYTES)
        assert allocated_bytes(path) >= large
        assert os.pread(fd, SIZE_BYTES, 0).count(0) == SIZE_BYTES - 5 * 4096
    finally:
        os.close(fd)
    assert large == 3 * LARGE_PAGE_BYTES


@pytest.mark.parametrize("size", [1, 4096, LARGE_PAGE_BYTES - 1, LARGE_PAGE_BYTES, SIZE_BYTES])
def test_a_segment_has_its_size_and_no_hole(path, size):
    directory.create_allocated(path, size)
    assert path.stat().st_size == size
    assert allocated_bytes(path) >= size


def test_a_kernel_that_refuses_costs_speed_alone(path, monkeypatch):
    monkeypatch.setattr(large_pages, "_MADV_COLLAPSE", 0x7FFF)
    directory.create_allocated(path, SIZE_BYTES)
    assert path.stat().st_size == SIZE_BYTES
    assert allocated_bytes(path) == SIZE_BYTES


def test_a_full_file_system_is_told_and_leaves_nothing(path, monkeypatch):
    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        directory.create_allocated(path, SIZE_BYTES)
    assert not path.exists()
