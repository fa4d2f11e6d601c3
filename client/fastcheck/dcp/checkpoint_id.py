"""Names of steps: DCP's `checkpoint_id`, and paths below a `fastcheck://` URL. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from fastcheck_proto.conventions import STEP_MAX, check_name

from ..errors import InvalidArgumentError, InvalidNameError

PROTOCOL = "fastcheck"
_STEP = re.compile(r"(?:step-)?([0-9]{1,19})")
#: pathlib makes one slash of two.
_URL = re.compile(rf"{PROTOCOL}:/{{1,2}}(?!/)(.*)", re.DOTALL)

#: What DCP hands over.
CheckpointId = str | os.PathLike[str] | int


class StepName(NamedTuple):
    """A step, and the job if a URL named it."""

    job: str | None
    step: int


def parse_checkpoint_id(checkpoint_id: object) -> StepName:
    """Read `"step-100"`, `"100"`, 100, a path of these, or `"fastcheck://job/step-100"`.

    Raises:
        InvalidArgumentError: it is none of these; the message shows the forms.
    """
    if isinstance(checkpoint_id, int) and not isinstance(checkpoint_id, bool):
        return StepName(None, _step(str(checkpoint_id), checkpoint_id))
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise _refused(checkpoint_id, "is no text, path or number")
    text = os.fspath(checkpoint_id)
    if not isinstance(text, str):
        raise _refused(checkpoint_id, "is no text")
    url = _URL.fullmatch(text)
    if url is None:
        if ":" in text:
            raise _refused(checkpoint_id, f"is no {PROTOCOL}:// URL")
        return StepName(None, _step(text, checkpoint_id))
    job, slash, step = url.group(1).removesuffix("/").partition("/")
    if not slash:
        raise _refused(checkpoint_id, "names a job and no step" if job else "names no job")
    return StepName(_job(job), _step(step, checkpoint_id))


@dataclass(frozen=True)
class StepPath:
    """What a path names: all jobs, a job, a step, or a file of it."""

    job: str | None = None
    step: int | None = None
    file: str | None = None


def parse_path(path: str) -> StepPath:
    """Read `job/step-100/file`, or the beginning of it.

    Raises:
        InvalidArgumentError: it is none.
    """
    job, _, rest = path.strip("/").partition("/")
    if not job:
        return StepPath()
    step, _, file = rest.partition("/")
    if not step:
        try:
            return StepPath(check_name("job", job))
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
    name = parse_checkpoint_id(f"{PROTOCOL}://{job}/{step}")
    if "/" in file:
        raise InvalidArgumentError(f"{PROTOCOL}://{path} is no file: a step has files and no folders")
    return StepPath(job, name.step, file or None)


def names_a_step(checkpoint_id: object) -> bool:
    """Whether `parse_checkpoint_id` can read it."""
    try:
        parse_checkpoint_id(checkpoint_id)
    except InvalidArgumentError:
        return False
    return True


def url_of(job: str, step: int) -> str:
    """The URL of a step."""
    return f"{PROTOCOL}://{job}/step-{step}"


def agreed_job(wanted: str | None, name: StepName) -> str | None:
    """The job that both name, or the one that is named at all.

    Raises:
        InvalidArgumentError: they differ.
    """
    if wanted is not None and name.job is not None and wanted != name.job:
        raise InvalidArgumentError(
            f"checkpoint_id names job {name.job!r}, but this reader or writer was made for job {wanted!r}: leave job= "
            "out, or make one for that job"
        )
    return wanted or name.job


def _job(name: str) -> str:
    try:
        return check_name("job", name)
    except ValueError as error:
        raise InvalidNameError(str(error)) from None


def _step(text: str, checkpoint_id: object) -> int:
    found = _STEP.fullmatch(text)
    if found is None or int(found.group(1)) > STEP_MAX:
        raise _refused(checkpoint_id, "names no step")
    return int(found.group(1))


def _refused(checkpoint_id: object, why: str) -> InvalidArgumentError:
    shown = repr(checkpoint_id)
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    return InvalidArgumentError(
        f"checkpoint_id {shown} {why}: use 'step-100', '100', 100 or '{PROTOCOL}://JOB/step-100'"
    )
