"""What names a step, and what a typo is told."""

from pathlib import Path, PurePosixPath

import pytest

from fastcheck.dcp.checkpoint_id import StepName, agreed_job, parse_checkpoint_id, url_of
from fastcheck.errors import InvalidArgumentError, InvalidNameError


@pytest.mark.parametrize(
    "given",
    ["step-100", "100", 100, "step-000100", Path("step-100"), PurePosixPath("100")],
)
def test_a_step_of_the_writers_own_job(given):
    assert parse_checkpoint_id(given) == StepName(None, 100)


@pytest.mark.parametrize(
    "given",
    [
        "fastcheck://gpt/step-100",
        "fastcheck://gpt/100",
        "fastcheck://gpt/step-100/",
        Path("fastcheck://gpt/step-100"),
        url_of("gpt", 100),
    ],
)
def test_a_url_names_the_job_too(given):
    assert parse_checkpoint_id(given) == StepName("gpt", 100)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "step-",
        "step_100",
        "Step-100",
        "step--1",
        "-1",
        -1,
        "1e3",
        "step-100/x",
        "/ckpt/step-100",
        "step-\u0661",
        10**19,
        str(2**62 + 1),
        "fastcheck:step-100",
        "fastcheck://",
        "fastcheck://gpt",
        "fastcheck://gpt/",
        "fastcheck://gpt/step-x",
        "fastcheck:///gpt/step-1",
        "fastchek://gpt/step-100",
        "s3://bucket/step-100",
        True,
        None,
        1.0,
        b"step-100",
    ],
)
def test_a_typo_is_shown_the_right_form(given):
    with pytest.raises(InvalidArgumentError, match=r"'step-100'.*'fastcheck://JOB/step-100'"):
        parse_checkpoint_id(given)


def test_a_url_with_a_bad_job():
    with pytest.raises(InvalidNameError, match="not a valid name"):
        parse_checkpoint_id("fastcheck://a job/step-1")


def test_an_endless_id_does_not_make_an_endless_message():
    with pytest.raises(InvalidArgumentError) as caught:
        parse_checkpoint_id("x" * 10_000)
    assert len(str(caught.value)) < 500


def test_two_jobs_disagree():
    assert agreed_job(None, StepName(None, 1)) is None
    assert agreed_job("gpt", StepName(None, 1)) == "gpt"
    assert agreed_job(None, StepName("gpt", 1)) == "gpt"
    assert agreed_job("gpt", StepName("gpt", 1)) == "gpt"
    with pytest.raises(InvalidArgumentError, match="'bert'.*'gpt'"):
        agreed_job("gpt", StepName("bert", 1))
