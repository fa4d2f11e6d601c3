"""The one way from both doors, the trainer's and the operator's, to the registry's deletion.

Who may go through each door is asked there: operators by their role (`roles.py`), trainers if the job is theirs
(`owners.py`).
"""

from __future__ import annotations

from typing import Protocol

from fastcheck_proto.conventions import STEP_MAX, check_name
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..errors import InvalidRequestError


class Deletes(Protocol):
    """What is needed of `registry.client.RegistryClient`."""

    async def delete_steps(
        self, request: rpb.DeleteStepsRequest, timeout_s: float
    ) -> rpb.DeleteStepsResponse:
        """Keep committed steps no more."""


def check(request: rpb.DeleteStepsRequest) -> None:
    """Refuse what nobody may ask for.

    Raises:
        InvalidRequestError: it names no job or step.
    """
    try:
        check_name("job", request.job)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    if request.step > STEP_MAX:
        raise InvalidRequestError(f"step {request.step} is not from 0 to {STEP_MAX}")


async def delete_steps(
    registry: Deletes, request: rpb.DeleteStepsRequest, timeout_s: float
) -> rpb.DeleteStepsResponse:
    """Delete, or say what would come of it.

    Raises:
        InvalidRequestError: it names no job or step.
        UnsafeError: the job runs, or a voter may not know deletion; the message says what to do.
        NoQuorumError: nobody can decide.
    """
    check(request)
    return await registry.delete_steps(request, timeout_s)
