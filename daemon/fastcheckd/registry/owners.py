"""Whose a job is: the identity that opened its first session, for as long as the registry knows the job. Pure.

An identity is `trainer/NAME` or `admin/NAME` by certificate, `token/SUBJECT` by token, and `local` for everybody else
who comes through a Unix socket or to a daemon without certificates. Operators may use every job. Jobs of versions
before this are `local`'s.
"""

from __future__ import annotations

from ..errors import DeniedError

LOCAL = "local"
_OPERATORS = "admin/"
#: `trainer/` and a name, `token/` and a subject.
IDENTITY_BYTES_MAX = 160


def may_use(identity: str, owner: str) -> bool:
    """Whether an identity may open, read, follow and replace the steps of an owner's job."""
    return identity == owner or identity.startswith(_OPERATORS)


def check_use(identity: str, owner: str, job_name: str) -> None:
    """The same as an error.

    Raises:
        DeniedError: it may not; the message says what to do.
    """
    if not may_use(identity, owner):
        raise DeniedError(
            f"job {job_name!r} belongs to {owner}, and this is {identity}: use its owner's certificate or token, "
            "or another name for the job"
        )
