"""The man page, the help and the pictures: complete, fresh, and with examples that work."""

import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.cluster import screenshots

from fastcheck.cli import manual
from fastcheck.cli.app import cli
from fastcheck.cli.output import Exit

PAGE = Path(__file__).parents[3] / "client" / "man" / "fastcheck.1"
COMMANDS = [(" ".join(names), command) for command, names in manual.walk(cli)]

each_command = pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])


def plain(roff):
    return roff.replace("\\-", "-").replace("\\(dq", '"').replace("\\&", "").replace("\\e", "\\")


def test_the_page_that_is_shipped_is_of_this_help():
    assert PAGE.read_text() == manual.page(), "run: make man"


@each_command
def test_each_command_is_in_it_with_every_option(name, command):
    (section,) = re.findall(
        rf'^\.SS "{re.escape(name)} \[OPTIONS\][^\n]*\n(.*?)(?=^\.S)',
        plain(manual.page()) + ".S",
        re.M | re.S,
    )
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert all(option in section for option in parameter.opts), parameter.opts
    assert command.get_short_help_str(limit=500).rstrip(".")[:40] in section


def test_all_exit_codes_are_in_it():
    assert [code for code, _ in manual.EXIT_CODES] == [int(code) for code in Exit]


def test_a_line_of_text_is_never_taken_for_a_request():
    assert not [line for line in manual.page().splitlines() if line.startswith("'")]
    known = {"TH", "SH", "SS", "PP", "TP", "B", "nf", "fi"}
    assert {line[1:].split()[0] for line in manual.page().splitlines() if line.startswith(".")} <= known


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_no_complaints():
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-K", "utf-8", str(PAGE)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@each_command
def test_the_list_of_commands_has_a_whole_sentence_for_each(name, command):
    """Two columns of 80 characters: what is cut off there helps nobody."""
    sentence = command.get_short_help_str(limit=60)
    assert sentence and not sentence.endswith("..."), sentence


@each_command
def test_every_example_is_a_line_that_the_command_takes(name, command):
    for line in re.findall(r"^  (?:eval \"\$\()?(fastcheck [^&|)\n]+)", command.epilog or "", re.M):
        words = shlex.split(re.split(r" {3,}", line)[0].partition(" >")[0])[1:]
        assert words[: len(name.split())] == name.split(), line
        context, group = None, cli
        while isinstance(group, click.Group) and words:
            context = group.make_context(group.name, [words[0]], parent=context, resilient_parsing=True)
            group, words = group.commands[words[0]], words[1:]
        group.make_context(group.name, words, parent=context)  # raises for what it does not take


def test_help_has_the_examples_a_line_each():
    text = CliRunner().invoke(cli, ["drain", "--help"]).stdout
    assert re.search(r"^\s+fastcheck drain node-7 --undo$", text, re.M)


def test_every_view_has_a_picture_that_the_page_shows():
    page = (screenshots.FOLDER.parent / "cli.md").read_text()
    shown = re.findall(r"\]\(screenshots/([a-z-]+)\.svg\)", page)
    made = {path.stem for path in screenshots.FOLDER.glob("*.svg")}
    assert sorted(shown) == sorted(screenshots.NAMES) and made == set(screenshots.NAMES), (
        "run: make screenshots"
    )


@pytest.mark.parametrize("name", screenshots.NAMES)
def test_a_picture_is_svg_and_asks_nobody(name):
    text = (screenshots.FOLDER / f"{name}.svg").read_text()
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"url\(['\"]?https?:|href=", text)


def test_what_is_printed_in_colour_is_drawn_in_colour():
    svg = screenshots.draw("x", 40, "status", "health  \x1b[1;32mOK\x1b[0m\n")
    assert "health" in svg and re.search(r"\.x-r\d+ \{ fill: #[0-9a-f]{6};font-weight: bold", svg)
