"""Pages made of the code, so that there is no second list: configuration, commands, counters, the Python interface."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import click

from fastcheck.cli.app import cli
from fastcheckd import main
from fastcheckd.config import Config, Voter
from fastcheckd.counters import NAMES
from fastcheckd.observe import families

#: The page of each part of the Python interface: heading → what is shown, in order.
PYTHON: dict[str, tuple[str, ...]] = {
    "For a training loop": (
        "fastcheck.checkpointer.Checkpointer",
        "fastcheck.handle.SaveHandle",
        "fastcheck.progress.LoadProgress",
    ),
    "When to save": ("fastcheck.advice.every", "fastcheck.advice.advise", "fastcheck.advice.Advice"),
    "What else a state needs": ("fastcheck.resume",),
    "torch.distributed.checkpoint": (
        "fastcheck.dcp.writer.FastCheckWriter",
        "fastcheck.dcp.reader.FastCheckReader",
    ),
    "Frameworks": (
        "fastcheck.integrations.transformers",
        "fastcheck.integrations.lightning",
        "fastcheck.integrations.accelerate",
    ),
    "For operators": ("fastcheck.admin.AdminClient", "fastcheck.local.cluster.LocalCluster"),
    "Errors": ("fastcheck.errors",),
}
_MADE = "*This page is made of the code: `{}`.*\n"
_TYPES = {"int": "whole number", "float": "number", "bool": "`true` or `false`", "str": "text"}
#: By the end of a key's name; the longest that fits counts.
_UNITS = {"_bytes_per_s": "bytes per second", "_bytes": "bytes", "_s": "seconds", "_port": "TCP port"}


def configuration() -> str:
    """Each key of the daemon's configuration: type, unit, default, meaning."""
    lines = [
        "# Configuration",
        "",
        _MADE.format("daemon/fastcheckd/config.py"),
        "One YAML file, `fastcheckd run --config FILE`. Flags (`--set key=value`) win over the environment",
        "(`FASTCHECK_<KEY>`), and that over the file; every key has a default, and unknown keys are errors. Sizes may",
        "be written with a unit, such as `8GiB` or `500MB`. A commented example is",
        "[deploy/example/node.yaml](../../deploy/example/node.yaml).",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    meanings = comments(Config)
    for field in dataclasses.fields(Config):
        kind = ", ".join(filter(None, [_kind(str(field.type)), _unit(field.name)]))
        lines.append(f"| `{field.name}` | {kind} | {_default(field)} | {meanings[field.name]} |")
    lines += ["", "## A voter", "", (Voter.__doc__ or "").strip(), "", "| key | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {text or 'as above'} |" for name, text in comments(Voter).items()]
    return "\n".join(lines) + "\n"


def comments(owner: type) -> dict[str, str]:
    """The `#:` comment above each field of a dataclass; one stands for the fields right below it that have none."""
    found: dict[str, str] = {}
    above: list[str] = []
    last = ""
    names = [field.name for field in dataclasses.fields(owner)]
    for line in inspect.getsource(owner).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            above.append(text.removeprefix("#:").strip())
        elif (name := text.partition(":")[0]) in names and name not in found:
            last = " ".join(above) or last
            found[name] = re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", last).replace("|", "\\|")
            above = []
    return found


def command_line() -> str:
    """Usage, options and help of every command of `fastcheck`, and of `fastcheckd`."""
    lines = [
        "# Commands",
        "",
        _MADE.format("client/fastcheck/cli"),
        "What they are for is told in [cli.md](../cli.md).",
        "",
    ]
    for path, command in commands(cli):
        with click.Context(command, info_name=" ".join(path)) as context:
            usage = command.get_usage(context).removeprefix("Usage: ")
            lines += [
                f"## {' '.join(path)}",
                "",
                (command.help or "").split("\f")[0].strip(),
                "",
                f"```\n{usage}\n```",
                "",
            ]
            records = [record for param in command.params if (record := param.get_help_record(context))]
        if records:
            lines += ["| argument or option | |", "|---|---|"]
            lines += [f"| `{names}` | {_cell(text)} |" for names, text in records] + [""]
    lines += ["## fastcheckd", "", f"```\n{main.make_parser().format_help().strip()}\n```", ""]
    return "\n".join(lines)


def commands(
    group: click.Command, path: tuple[str, ...] = ("fastcheck",)
) -> list[tuple[tuple[str, ...], click.Command]]:
    """A command and all below it, by their names."""
    found = [(path, group)]
    if isinstance(group, click.Group):
        for name in sorted(group.commands):
            found += commands(group.commands[name], (*path, name))
    return found


def counters() -> str:
    """Every counter of the data process: its name, in Prometheus, and what it counts."""
    lines = [
        "# Counters",
        "",
        _MADE.format("daemon/fastcheckd/counters.py"),
        "Counted since the data process started; `fastcheck nodes -o json` shows them, and `/metrics`.",
        "",
        "| name | in Prometheus | counts |",
        "|---|---|---|",
    ]
    # A family's name lacks `_total`.
    shown = [f"{family.name}_total" for family in families.counters(dict.fromkeys(NAMES, 0), NAMES)]
    lines += [f"| `{name}` | `{metric}` | {NAMES[name]} |" for name, metric in zip(NAMES, shown, strict=True)]
    return "\n".join(lines) + "\n"


def python() -> str:
    """The Python interface; mkdocstrings puts the docstrings in."""
    lines = [
        "# Python",
        "",
        _MADE.format("client/fastcheck"),
        "What a name is for comes first; all raise errors of one tree, the last section.",
        "",
    ]
    for heading, names in PYTHON.items():
        lines += [f"## {heading}", ""]
        lines += [f"::: {name}\n" for name in names]
    return "\n".join(lines)


#: Pages of the site that are made here.
GENERATED = {
    "reference/configuration.md": configuration,
    "reference/command-line.md": command_line,
    "reference/counters.md": counters,
    "reference/python.md": python,
}


def _kind(annotation: str) -> str:
    plain, _, nothing = annotation.partition(" | ")
    if plain.startswith("tuple[Voter"):
        return "list of [voters](#a-voter)"
    if plain.startswith("dict"):
        return "mapping"
    return _TYPES.get(plain, plain.lower()) + (", or none" if nothing else "")


def _unit(key: str) -> str:
    return next((unit for ending, unit in _UNITS.items() if key.endswith(ending)), "")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _shown(field.name, field.default)
    assert field.default_factory is not dataclasses.MISSING
    if field.default_factory is dict:
        return "`{}`"
    return "of the machine"


def _shown(key: str, value: Any) -> str:
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if key.endswith("_bytes"):
        return f"`{value >> 20}MiB`" if value and value % (1 << 20) == 0 else f"`{value}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
