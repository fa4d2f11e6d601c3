"""Paths below fastcheck:// that name nothing or cannot be written are refused by name, before a daemon is asked."""

import pytest

from fastcheck import InvalidArgumentError
from fastcheck.dcp.checkpoint_id import StepPath, parse_path
from fastcheck.dcp.filesystem import FastCheckFileSystem


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("", StepPath()),
        ("gpt", StepPath("gpt")),
        ("gpt/", StepPath("gpt")),
        ("gpt/step-3", StepPath("gpt", 3)),
        ("gpt/step-3/.metadata", StepPath("gpt", 3, ".metadata")),
    ],
)
def test_what_a_path_names(path, place):
    assert parse_path(path) == place


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a job", "'a job' is not a valid name"),
        ("gpt/stp-3", "'fastcheck://gpt/stp-3' names no step"),
        ("gpt/stp-3/.metadata", "'fastcheck://gpt/stp-3' names no step"),
        ("gpt/step-3/folder/file", "fastcheck://gpt/step-3/folder/file is no file"),
    ],
)
def test_a_typo_is_shown(path, words):
    with pytest.raises(InvalidArgumentError, match=words):
        parse_path(path)


@pytest.fixture
def fs():
    return FastCheckFileSystem(address="unix:///nowhere.sock", skip_instance_cache=True)


@pytest.mark.parametrize(
    ("path", "mode", "words"),
    [
        ("fastcheck://gpt/step-3", "wb", "fastcheck://gpt/step-3 is no file"),
        ("fastcheck://gpt/step-3/__0_0.distcp", "ab", "mode 'ab'"),
        ("fastcheck://gpt/step-3/model.pt", "wb", "'model.pt' cannot be written"),
        ("fastcheck://gpt/step-3/__0_1.distcp", "wb", "'__0_1.distcp' cannot be written.*FastCheckWriter"),
    ],
)
def test_a_file_that_cannot_be_opened(fs, path, mode, words):
    with pytest.raises(InvalidArgumentError, match=words):
        fs.open(path, mode)


def test_a_rank_that_is_not_there(fs):
    with (
        pytest.raises(InvalidArgumentError, match=r"__4_0.distcp' is of rank 4, but there are 1"),
        fs.open("fastcheck://gpt/step-3/__4_0.distcp", "wb") as file,
    ):
        file.write(b"bytes")


def test_only_a_metadata_file_of_ones_own_is_renamed(fs):
    with pytest.raises(InvalidArgumentError, match=r"cannot be renamed to 'model.pt'"):
        fs.mv("fastcheck://gpt/step-3/a", "fastcheck://gpt/step-3/model.pt")
    with pytest.raises(FileNotFoundError, match=r"gpt/step-3/.metadata.tmp was not written here"):
        fs.mv("fastcheck://gpt/step-3/.metadata.tmp", "fastcheck://gpt/step-3/.metadata")


def test_a_folder_that_names_no_step(fs):
    with pytest.raises(InvalidArgumentError, match="'fastcheck://gpt' names no step"):
        fs.makedirs("fastcheck://gpt")
