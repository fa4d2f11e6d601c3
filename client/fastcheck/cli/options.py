"""Options that commands share, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcheck_proto.conventions import check_name, default_address

from ..errors import DaemonUnavailableError, FastCheckError
from ..security import SERVER_NAME, VARIABLES
from . import shell_completion
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


# Generic in later releases alone, and 8.1 will do.
if TYPE_CHECKING:
    TextType = click.ParamType[str]
else:
    TextType = click.ParamType


class Name(TextType):
    """A job's or node's name; a bad one is wrong usage and never sent."""

    def __init__(self, what: str) -> None:
        self.name = what

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        try:
            return check_name(self.name, value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


job_argument = click.argument("job", type=Name("job"), shell_complete=shell_completion.jobs)
node_argument = click.argument("node", type=Name("node"), shell_complete=shell_completion.nodes)


def examples(*lines: str) -> str:
    """The epilog of a command's help: example lines. `\\b` keeps click from joining them."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


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


def _into_environment(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Set the variable that the SDK reads, until the command is done."""
    name = str(param.envvar)
    if value is None or os.environ.get(name) == value:
        return
    before = os.environ.get(name)
    os.environ[name] = value

    def restore() -> None:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

    ctx.call_on_close(restore)


_TLS_OPTIONS = [
    click.option(
        option,
        envvar=variable,
        metavar=metavar,
        expose_value=False,
        callback=_into_environment,
        help=f"{what} [env: {variable}]",
    )
    for option, variable, metavar, what in (
        ("--tls-server-name", SERVER_NAME, "NAME", "Name in the daemon's certificate, if not the host's."),
        ("--tls-ca", VARIABLES[2], "FILE", "Authority of the daemons' certificates."),
        ("--tls-key", VARIABLES[1], "FILE", "Key of --tls-cert."),
        ("--tls-cert", VARIABLES[0], "FILE", "Certificate to show at a host:port."),
    )
]


def admin_options(command: F) -> F:
    """`--address`, TLS options, `--timeout` and `-o`, for commands that query a cluster."""
    return patient_admin_options(5.0)(command)


def patient_admin_options(default_s: float) -> Callable[[F], F]:
    """`admin_options` with another default timeout, for commands that take longer."""
    address = click.option(
        "--address",
        envvar="FASTCHECK_ADDRESS",
        default=default_address,
        show_default="FASTCHECK_ADDRESS, else this node's daemon",
        help="Any node's agent: unix:///path or host:port.",
    )

    def options(command: F) -> F:
        for option in _TLS_OPTIONS:
            command = option(command)
        return address(timeout_option(default_s, "Longest wait for the answer.")(output_option(command)))

    return options


yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def go_ahead(ctx: click.Context, what: str, *, yes: bool) -> None:
    """Say what is about to happen and ask for confirmation. Not interactive and without --yes: a usage error."""
    say(what)
    if yes:
        return
    if not is_interactive():
        say("fastcheck: nobody is there to be asked; pass --yes to do it")
        ctx.exit(Exit.USAGE)
    click.confirm("Go on?", abort=True, err=True)


def is_interactive() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()
