"""The man page, made from the commands' own help: `python -m fastcheck.cli.manual > client/man/fastcheck.1`.

One page for all commands, as for systemctl(1), so that it can be searched. click-man would write forty small pages and
cannot join them. The output doesn't depend on the machine, so a test compares the checked-in page with it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from .app import cli

EXIT_CODES = (
    (0, "All is well, or done."),
    (1, "An error: refused, or answered no."),
    (2, "Wrong usage; nothing was done."),
    (3, "Nobody answers at the address."),
    (4, "Critical: nothing is committed, or committed bytes are gone or would be."),
    (5, "Degraded: all is there, and less than wanted would survive; or something bad was found."),
)
ENVIRONMENT = (
    ("FASTCHECK_ADDRESS", "Any node's agent: unix:///path or host:port. Default: this node's daemon."),
    ("FASTCHECK_TLS_CERT, FASTCHECK_TLS_KEY, FASTCHECK_TLS_CA", "PEM files for a host:port under TLS."),
    ("FASTCHECK_TLS_SERVER_NAME", "Name in the daemon's certificate, if not the host's."),
    ("NO_COLOR", "If set, tables have no colours. Nothing that is not a terminal gets any."),
)


def page(root: click.Group = cli) -> str:
    """The whole page, in roff with the man macros."""
    lines = [
        '.TH FASTCHECK 1 "" "FastCheck" "User Commands"',
        ".SH NAME",
        "fastcheck \\- " + _text(_first_sentence(root)),
        ".SH SYNOPSIS",
        ".B fastcheck",
        "[\\fIOPTION\\fR]... \\fICOMMAND\\fR [\\fIARGUMENT\\fR]...",
        ".SH DESCRIPTION",
        *_paragraphs(_help(root)),
        "Each command prints a table for people or, with \\fB\\-o json\\fR or \\fB\\-o yaml\\fR, that alone on "
        "standard output. Messages go to standard error.",
        ".SH COMMANDS",
    ]
    context = click.Context(root, info_name="fastcheck")
    for command, names in walk(root):
        lines += _command(command, names, context)
    lines += [".SH EXIT STATUS"]
    for code, meaning in EXIT_CODES:
        lines += [".TP", f".B {code}", _text(meaning)]
    lines += [".SH ENVIRONMENT"]
    for name, meaning in ENVIRONMENT:
        lines += [".TP", f".B {_text(name)}", _text(meaning)]
    return "\n".join([*lines, ".SH SEE ALSO", "docs/cli.md of FastCheck's sources.", ""])


def walk(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[click.Command, tuple[str, ...]]]:
    """Every command below a group with its names from the top, in the order of `--help`."""
    for name in sorted(group.commands):
        command = group.commands[name]
        yield command, (*above, name)
        if isinstance(command, click.Group):
            yield from walk(command, (*above, name))


def _command(command: click.Command, names: tuple[str, ...], root: click.Context) -> list[str]:
    context = click.Context(command, info_name=names[-1], parent=root)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f'.SS "{_text(" ".join(names))} {_text(usage)}"', *_paragraphs(_help(command))]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and "--help" not in parameter.opts:
            lines += [".TP", f"\\fB{_text(record[0])}\\fR", _text(record[1])]
    if command.epilog:
        lines += [".PP", ".nf", *map(_text, command.epilog.removeprefix("\b\n").splitlines()), ".fi"]
    return lines


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")


def _first_sentence(command: click.Command) -> str:
    """The first sentence of a command's help, without capital and full stop."""
    sentence = re.split(r"(?<=\.)\s", _help(command), maxsplit=1)[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def _paragraphs(text: str) -> list[str]:
    found = []
    for paragraph in text.split("\n\n"):
        found += [".PP", _text(" ".join(paragraph.split()))]
    return found


def _text(text: str) -> str:
    """Text, escaped so that roff shows it unchanged."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    # A line that begins with a dot or an apostrophe would be a request.
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    print(page(), end="")
