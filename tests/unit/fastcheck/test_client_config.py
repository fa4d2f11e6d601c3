"""Who a process is: explicit arguments, then the environment, then rank 0 of 1; and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import fastcheck
from fastcheck import Checkpointer, InvalidArgumentError, InvalidNameError
from fastcheck.config import resolve
from fastcheck.connection import parse_address

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "run-7", "LOCAL_RANK": "1"}


def test_torchruns_variables_are_enough():
    found = resolve(environment=TORCHRUN | {"FASTCHECK_ADDRESS": "unix:///x/y.sock"})
    assert (found.job, found.rank, found.world_size, found.address) == ("run-7", 3, 8, "unix:///x/y.sock")
    assert found.enabled


def test_arguments_win_over_the_environment():
    env = TORCHRUN | {"FASTCHECK_JOB": "env-job", "FASTCHECK_ADDRESS": "unix:///x/y.sock"}
    assert resolve(environment=env).job == "env-job"
    found = resolve("gpt", 0, 2, "h:1", environment=env)
    assert (found.job, found.rank, found.world_size, found.address) == ("gpt", 0, 2, "h:1")


def test_a_lone_process_is_rank_0_of_1_with_the_default_socket():
    found = resolve("gpt", environment={})
    assert (found.rank, found.world_size) == (0, 1)
    assert found.address.startswith("unix:///")
    assert found.address.endswith("/fastcheckd.sock")


def test_other_integers_are_welcome():
    assert resolve("gpt", np.int64(1), np.int32(2), environment={}).rank == 1


@pytest.mark.parametrize("job", ["../x", "", "x" * 300, ".", "..", "a b", "ü", "a/b", "a\n"])
def test_names_that_could_not_be_file_names_are_refused(job):
    with pytest.raises(InvalidNameError) as caught:
        Checkpointer(job=job)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("env", [{}, {"TORCHELASTIC_RUN_ID": "none"}, {"FASTCHECK_JOB": ""}])
def test_a_job_without_a_name_is_told_how_to_get_one(env):
    with pytest.raises(InvalidNameError, match="FASTCHECK_JOB"):
        resolve(environment=env)


@pytest.mark.parametrize(
    ("arguments", "env", "word"),
    [
        ({}, {"RANK": "x"}, "RANK='x'"),
        ({}, {"RANK": "-1"}, "RANK = -1"),
        ({}, {"RANK": "3"}, "rank 3 does not exist"),
        ({}, {"WORLD_SIZE": "0"}, "WORLD_SIZE = 0"),
        ({"rank": 2, "world_size": 2}, {}, "rank 2"),
        ({"rank": True}, {}, "rank must be a whole number"),
        ({"rank": 0.0}, {}, "rank must be a whole number"),
        ({"world_size": "2"}, {}, "world_size must be a whole number"),
        ({"world_size": 10**9}, {}, "world_size"),
        ({}, {"FASTCHECK_DISABLE": "maybe"}, "FASTCHECK_DISABLE"),
    ],
)
def test_values_that_make_no_sense_name_their_source(arguments, env, word):
    with pytest.raises(InvalidArgumentError, match=word):
        resolve("gpt", environment=env, **arguments)


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_disabled_and_needing_no_name(text):
    assert not resolve(environment={"FASTCHECK_DISABLE": text}).enabled


@pytest.mark.parametrize("text", ["0", "", "false", "Off"])
def test_not_disabled(text):
    assert resolve("gpt", environment={"FASTCHECK_DISABLE": text}).enabled


def test_addresses():
    assert parse_address("unix:///run/x.sock").target == "unix:/run/x.sock"
    assert parse_address("unix:/run/x.sock").local
    assert parse_address("host-1:7450") == parse_address("host-1:7450")
    assert not parse_address("[::1]:7450").local


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:70000",
        "unix://x",
        "unix://",
        "http://h:1",
        "unix:///" + "x" * 120,
    ],
)
def test_bad_addresses_are_refused_when_made(text):
    with pytest.raises(InvalidArgumentError, match=r"unix:///path"):
        parse_address(text)


@pytest.mark.parametrize(
    "arguments", [{"max_in_flight": -1}, {"copy_threads": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")}]
)
def test_bad_settings_are_refused_when_made(arguments):
    with pytest.raises(InvalidArgumentError):
        Checkpointer(job="gpt", **arguments)


def test_importing_the_package_brings_in_neither_torch_nor_grpc():
    code = (
        "import sys, fastcheck; assert fastcheck.FastCheckError and fastcheck.__version__; "
        "assert not {'torch', 'grpc'} & set(sys.modules); "
        "from fastcheck import Checkpointer, SaveHandle; "
        "assert 'torch.distributed.tensor' not in sys.modules; "
        "assert not {'fastcheckd', 'xxhash', 'yaml', 'click', 'numpy.core'} & set(sys.modules)"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)


def test_everything_that_is_exported_exists():
    for name in fastcheck.__all__:
        assert getattr(fastcheck, name)
    with pytest.raises(AttributeError):
        _ = fastcheck.nonsense
