"""Options that every command shares, and the one place where errors become exit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from fastcheck_proto.conventions import default_address

from ..errors import DaemonUnavailableError, FastCheckError
from .output import FORMATS, Exit, say

F = TypeVar("F", bound=Callable[..., Any])


class FastCheckGroup(click.Group):
    """A click group whose commands may raise the SDK's errors: one line on stderr and the right exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except DaemonUnavailableError as error:
            say(f"fastcheck: {error}")
            ctx.exit(Exit.UNREACHABLE)
        except FastCheckError as error:
            say(f"fastcheck: {error}")
            ctx.exit(Exit.ERROR)


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="table for people; json or yaml alone on stdout for programs.",
)


def timeout_option(default_s: float, what: str) -> Callable[[F], F]:
    """`--timeout`, in seconds."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=what,
    )


def admin_options(command: F) -> F:
    """`--address`, `--timeout` and `-o`, as all questions to the cluster take them."""
    address = click.option(
        "--address",
        envvar="FASTCHECK_ADDRESS",
        default=default_address,
        show_default="FASTCHECK_ADDRESS, else this node's daemon",
        help="Any node's agent: unix:///path or host:port.",
    )
    return address(timeout_option(5.0, "Longest wait for the answer.")(output_option(command)))
