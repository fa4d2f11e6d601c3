"""Files are ours, bounded, and not reached through links."""

import os

import pytest

from fastcheckd.errors import CorruptError, StoreError
from fastcheckd.store import directory as files


def test_a_folder_is_made_for_this_user_alone(tmp_path):
    files.own_folder(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    files.own_folder(tmp_path / "new")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        files.own_folder(tmp_path / "open")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(StoreError, match="belongs to uid 12345"):
        files.own_folder(tmp_path / "theirs")


def test_a_link_or_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="symbolic link"):
        files.own_folder(tmp_path / "link")
    with pytest.raises(StoreError, match="not a folder"):
        files.own_folder(tmp_path / "file")


def test_reading_is_bounded_and_of_regular_files_only(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    assert files.read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(CorruptError, match="more than 4"):
        files.read_bounded(tmp_path / "file", 4)
    for name in ("link", "fifo", ".", "missing"):
        with pytest.raises(CorruptError, match="regular file"):
            files.read_bounded(tmp_path / name, 5)


def test_a_new_file_never_overwrites_and_is_private(tmp_path):
    files.write_new(tmp_path / "a", b"one")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "a", b"two")
    (tmp_path / "dangling").symlink_to("elsewhere")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "dangling", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert not (tmp_path / "elsewhere").exists()


def test_discarding_does_not_follow_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to("kept")
    files.discard(tmp_path / "gone")
    files.discard(tmp_path / "link")
    files.discard(tmp_path / "link")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").exists()
