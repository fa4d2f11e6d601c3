"""A rank of a job is saved by one saver of a process at a time, whichever writer it uses."""

import pytest

from fastcheck import InvalidArgumentError
from fastcheck.dcp.checkpointer_pool import CheckpointerOptions, checkpointer_of, close_job

NOWHERE = CheckpointerOptions(address="unix:///nowhere.sock")


def test_two_savers_at_once():
    try:
        with checkpointer_of("gpt", 0, 1, NOWHERE) as seat:
            with (
                pytest.raises(
                    InvalidArgumentError, match="rank 0 of job 'gpt' is just being saved by another"
                ),
                checkpointer_of("gpt", 0, 1, NOWHERE),
            ):
                raise AssertionError("both have it")
            with checkpointer_of("bert", 0, 1, NOWHERE) as other:
                assert other is not seat
        with checkpointer_of("gpt", 0, 1, NOWHERE) as again:
            assert again is seat
    finally:
        close_job("gpt")
        close_job("bert")
