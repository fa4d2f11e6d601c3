"""What the SDK is configured with: who this process is in its job, which daemon it uses, and the precision it asks for.

Explicit arguments win; torchrun's variables come next; a process without any is rank 0 of 1. Apart from certificates
and tokens (`credentials`), nothing else in the SDK reads the environment.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsIndex

from fastcheck_proto.conventions import RANK_MAX, check_name, default_address
from fastcheck_proto.v1 import layout_pb2 as pb

from .errors import InvalidArgumentError, InvalidNameError

#: torchrun's id of a run without a name: every unnamed job of the cluster would share it.
_UNNAMED_RUN = "none"
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """A rank of a job and its daemon. `enabled` is False when FASTCHECK_DISABLE is set."""

    job: str
    rank: int
    world_size: int
    address: str
    enabled: bool = True


def resolve(
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> RankConfig:
    """Determine the identity of this process.

    Raises:
        InvalidNameError: no job is named, or its name is not a valid one.
        InvalidArgumentError: rank, world size or a switch is not usable; the message names its source.
    """
    env = os.environ if environment is None else environment
    enabled = not _disabled(env)
    the_rank = _number("rank", rank, "RANK", env, default=0, least=0)
    the_world = _number("world_size", world_size, "WORLD_SIZE", env, default=1, least=1)
    if the_rank >= the_world:
        raise InvalidArgumentError(
            f"rank {the_rank} does not exist in a world of {the_world}: pass rank= and world_size=, "
            "or set RANK and WORLD_SIZE together as torchrun does"
        )
    return RankConfig(
        job=_job(job, env, needed=enabled),
        rank=the_rank,
        world_size=the_world,
        address=address or env.get("FASTCHECK_ADDRESS") or default_address(),
        enabled=enabled,
    )


def ranks_here(environment: Mapping[str, str] | None = None) -> int:
    """The number of ranks in the environment; 1 where it names none.

    Raises:
        InvalidArgumentError: WORLD_SIZE is not usable.
    """
    env = os.environ if environment is None else environment
    return _number("world_size", None, "WORLD_SIZE", env, default=1, least=1)


def _disabled(env: Mapping[str, str]) -> bool:
    text = env.get("FASTCHECK_DISABLE", "").strip().lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    raise InvalidArgumentError(f"FASTCHECK_DISABLE={text!r} is neither yes nor no: set it to 1 or 0")


def _job(job: str | None, env: Mapping[str, str], *, needed: bool) -> str:
    name = job
    if name is None:
        run = env.get("TORCHELASTIC_RUN_ID", "")
        name = env.get("FASTCHECK_JOB") or (run if run != _UNNAMED_RUN else "")
        if not name:
            if not needed:
                return "disabled"
            raise InvalidNameError(
                "the job has no name: pass job=, set FASTCHECK_JOB, or give torchrun an --rdzv-id. "
                "It must be the same on every rank and after every restart"
            )
    try:
        return check_name("job", name)
    except ValueError as error:
        raise InvalidNameError(str(error)) from None


def _number(
    what: str, value: SupportsIndex | None, variable: str, env: Mapping[str, str], *, default: int, least: int
) -> int:
    source = what
    if value is None:
        text = env.get(variable, "").strip()
        if not text:
            return default
        source = variable
        try:
            value = int(text)
        except ValueError:
            raise InvalidArgumentError(f"{variable}={text!r} is not a whole number") from None
    number = whole_number(source, value)
    if not least <= number <= RANK_MAX:
        raise InvalidArgumentError(f"{source} = {number} must be from {least} to {RANK_MAX}")
    return number


def whole_number(what: str, value: SupportsIndex) -> int:
    """`value` as an int; raises InvalidArgumentError for what only looks like one, booleans included."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidArgumentError(f"{what} must be a whole number, not {value!r}")


EXACT = "exact"
#: "momentum8": optimizer moments as 8-bit codes, one scale per block. "compact": 4-bit codes, and parameters within a
#: thousandth of a standard deviation. Both stay far below the noise between seeds (docs/benchmarks.md).
_LOSSY = {
    "momentum8": pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX8),
    "compact": pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX4, weights_bound=1e-3),
}


def parse_precision(name: str) -> pb.Precision | None:
    """The message for a named precision; None for "exact".

    Raises:
        InvalidArgumentError: there is no precision of that name.
    """
    if name == EXACT:
        return None
    if not isinstance(name, str) or name not in _LOSSY:
        raise InvalidArgumentError(
            f"precision = {name!r} must be one of {', '.join(map(repr, (EXACT, *_LOSSY)))}"
        )
    return _LOSSY[name]
