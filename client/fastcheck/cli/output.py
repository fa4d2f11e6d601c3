"""Output of results: JSON or YAML alone on stdout, or a table; messages on stderr. Also the exit codes."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TextIO

import yaml
from rich.console import Console, RenderableType

Json = dict[str, Any]

#: Grows when a key of any command's output changes its meaning or goes away; new keys do not count.
SCHEMA_VERSION = 1
_PIPE_WIDTH = 200
FORMATS = ("table", "json", "yaml")


class Exit(IntEnum):
    """What the exit status of every command means. 2 is click's own for wrong usage."""

    OK = 0
    ERROR = 1
    USAGE = 2
    UNREACHABLE = 3
    CRITICAL = 4
    DEGRADED = 5


def exit_for_health(health: str) -> Exit:
    """Exit status of `fastcheck status`."""
    return {"OK": Exit.OK, "DEGRADED": Exit.DEGRADED}.get(health, Exit.CRITICAL)


def stdout_console() -> Console:
    """The console for tables. Rich honours NO_COLOR, and prints no colours where stdout is not a terminal."""
    return Console(highlight=False, width=_width(sys.stdout))


def stderr_console() -> Console:
    """The console for messages."""
    return Console(stderr=True, highlight=False, width=_width(sys.stderr))


def _width(stream: TextIO) -> int | None:
    """Width of a console. None: the terminal's. For a pipe a fixed width, so that nothing is cut or folded."""
    return None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH


def say(text: str) -> None:
    """Print one message to stderr."""
    stderr_console().print(text, markup=False, soft_wrap=True)


def emit(result: Json, output: str, table: Callable[[Json], RenderableType]) -> None:
    """Print a command's result in the format asked for."""
    if output == "table":
        stdout_console().print(table(result))
    else:
        sys.stdout.write(dump(result, output))
        sys.stdout.flush()


def dump(result: Json, output: str, *, one_line: bool = False) -> str:
    """The result as text for programs, with a final newline."""
    versioned = {"schema_version": SCHEMA_VERSION, **result}
    if output == "yaml":
        return yaml.safe_dump(versioned, sort_keys=False, allow_unicode=True)
    return json.dumps(versioned, indent=None if one_line else 2) + "\n"


def human_bytes(count: int) -> str:
    """`1.5 GiB`: at most four characters and a unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the loop ends at the last unit")


def human_age(iso_utc: str | None, now: datetime.datetime) -> str:
    """How long ago an ISO-8601 moment was: `12 s`, `3 min`, `2 h`; `never` for none."""
    if iso_utc is None:
        return "never"
    return human_seconds((now - datetime.datetime.fromisoformat(iso_utc)).total_seconds())


def human_seconds(seconds: float) -> str:
    """A length of time: `12 s`, `3 min`, `2 h`."""
    seconds = max(0.0, seconds)
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
