"""The documentation keeps its word: links lead somewhere, tests and counters it names exist, the example is valid."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import click
import pytest
from tests.unit.fastcheckd.observe.observe_facts import all_families

from fastcheck.cli.app import cli
from fastcheck_proto.v1 import common_pb2
from fastcheckd import rpc
from fastcheckd.config import Config
from fastcheckd.config_sources import load_config
from fastcheckd.counters import NAMES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
EXAMPLE = ROOT / "deploy" / "example" / "node.yaml"
#: The example's lines that show a default: no blank after the hash.
SHOWN_DEFAULT = re.compile(r"^#(?=[a-z_]+: )", re.MULTILINE)

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one of its rank."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {title!r}"
    return found[1]


def anchors(page: Path) -> set[str]:
    """What a link may name behind the hash: headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and variables at the top of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(found)


@page_by_page
def test_every_relative_link_leads_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if (
            not target.is_relative_to(ROOT)
            or not target.exists()
            or (anchor and anchor not in anchors(target))
        ):
            broken.append(link)
    assert not broken


@page_by_page
def test_every_test_that_is_named_exists(page):
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or name not in names_in(ROOT / path)
    ]
    assert not missing


def test_every_guarantee_has_a_statement_tests_and_limits():
    guarantees = re.split(r"^### (?=G\d)", section("docs/failure-modes.md", "Guarantees"), flags=re.MULTILINE)
    assert [text[:2] for text in guarantees[1:]] == [f"G{number}" for number in range(1, 9)]
    for text in guarantees[1:]:
        assert re.search(r"^\*\*", text, re.MULTILINE), text[:30]
        assert "*How.*" in text and "*Not covered.*" in text, text[:30]
        assert "tests/" in text.partition("*Tests.*")[2], text[:30]


@page_by_page
def test_sequence_diagrams_have_no_semicolon(page):
    """Mermaid ends a statement there, and the site would show an error in the diagram's place."""
    diagrams = re.findall(
        r"^```mermaid\n(sequenceDiagram\n.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    assert not [line for diagram in diagrams for line in diagram.splitlines() if ";" in line]


def test_renamed_counters_lead_to_names_that_exist():
    rows = re.findall(r"^\| (`.+`.*) \| `(\w+)` \|$", section("docs/operations.md", "Metrics"), re.MULTILINE)
    renamed = {old: new for olds, new in rows for old in re.findall(r"`(\w+)`", olds)}
    assert len(renamed) == 8
    gauges = {family.name for family in all_families()["data"]}
    assert {new for new in renamed.values() if new not in NAMES and f"fastcheck_{new}" not in gauges} == set()
    assert not set(renamed) & set(NAMES)


@pytest.mark.parametrize(
    "page", ["docs/concepts.md", "docs/formats.md", "docs/operations.md", "CONTRIBUTING.md"]
)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`([\w/]+/(?:[\w/]+\.py)?)`", prose(ROOT / page))
    roots = [ROOT, ROOT / "daemon" / "fastcheckd"]
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []


def test_every_error_code_has_its_status_on_the_page_of_formats():
    told = {
        f"ERROR_CODE_{code}": status
        for codes, status in re.findall(
            r"([A-Z_]+(?:,\s[A-Z_]+)*)\s→\s([A-Z_]+)", section("docs/formats.md", "Errors")
        )
        for code in re.split(r",\s", codes)
    }
    real = {
        name: rpc._STATUS[value].name if value in rpc._STATUS else "INTERNAL"
        for name, value in common_pb2.ErrorCode.items()
        if value != common_pb2.ERROR_CODE_UNSPECIFIED
    }
    assert told == real


def test_every_health_code_is_in_the_failure_modes():
    sources = (ROOT / "daemon/fastcheckd/services").glob("health_*.py")
    codes = set(re.findall(r'code="([A-Z_]+)"', "".join(source.read_text() for source in sources)))
    assert {"NO_QUORUM", "REPLICA_SHORT"} <= codes
    listed = re.findall(r"^\| `([A-Z_]+)` \|", section("docs/failure-modes.md", "Health codes"), re.MULTILINE)
    assert set(listed) == codes


def test_every_command_is_on_its_page_with_options_that_it_has():
    rows = re.findall(r"^\| `(\w[\w-]*)([^`]*)`", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(cli.commands)
    for name, usage in rows:
        command = cli.commands[name]
        if isinstance(command, click.Group):
            command = command.commands.get(usage.split()[0] if usage.strip() else "", command)
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", usage)) <= options, name


@pytest.mark.parametrize("with_shown_defaults", [False, True])
def test_the_example_configuration_is_valid_as_written(tmp_path, with_shown_defaults):
    text = EXAMPLE.read_text()
    if with_shown_defaults:
        text, count = SHOWN_DEFAULT.subn("", text)
        assert count > 5
    path = tmp_path / "node.yaml"
    path.write_text(text)
    config = load_config(path, environment={})
    assert len(config.voters) == 3 and config.own_voter is not None
    assert config.own_voter.registry_address.startswith(config.host)
    if with_shown_defaults:
        shown = {match[1] for match in re.finditer(r"^#([a-z_]+): ", EXAMPLE.read_text(), re.MULTILINE)}
        changed = [
            field.name
            for field in dataclasses.fields(Config)
            if field.name in shown and getattr(config, field.name) != field.default
        ]
        assert not changed


@pytest.mark.parametrize("page", ["docs/failure-modes.md", "deploy/README.md", "deploy/example/node.yaml"])
def test_configuration_keys_that_are_named_exist(page):
    keys = {field.name for field in dataclasses.fields(Config)}
    words = set(
        re.findall(
            r"`([a-z]+(?:_[a-z]+)*_(?:s|bytes|dir|port|steps|flight|file))`", (ROOT / page).read_text()
        )
    )
    # Counters and SDK arguments end like keys do.
    assert words - keys - set(NAMES) <= {"timeout_s", "ranks_timeout_s"}
