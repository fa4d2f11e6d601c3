"""The site is made of all pages and of the code. MkDocs is not needed here: it does what these modules decide."""

import dataclasses
import posixpath
import re
import sys
from pathlib import Path

import click
import pytest
import yaml

from fastcheck.cli.app import cli
from fastcheckd.config import Config

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "site"))  # where MkDocs finds them

import site_map  # noqa: E402
import site_reference  # noqa: E402

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
OURS = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))
}
BROUGHT = {here: (ROOT / there).read_text() for here, there in site_map.PAGES.items()}
BROUGHT |= {here: site_map.folder_page(there) for here, there in site_map.FOLDERS.items()}
MADE = {here: make() for here, make in site_reference.GENERATED.items()}
PAGES = OURS | BROUGHT | MADE


def in_nav(part):
    """The pages of a part of the navigation."""
    if isinstance(part, str):
        return [part]
    return [page for below in (part.values() if isinstance(part, dict) else part) for page in in_nav(below)]


def test_the_navigation_has_every_page_once():
    named = in_nav(SITE["nav"])
    assert len(set(named)) == len(named)
    assert set(named) == set(PAGES), "mkdocs.yml does not list what there is"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_link_leads_somewhere_on_the_site(page):
    files = {site_map.on_site(path) for path in site_map.brought_in({page: PAGES[page]})}
    broken = []
    for link in site_map.links(site_map.turned(page, PAGES[page])):
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        known = target in PAGES or target in files or (ROOT / "docs" / target).is_file()
        if not known or (anchor and anchor not in anchors(PAGES[target])):
            broken.append(link)
    assert not broken


def anchors(text):
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {site_map.slug(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def test_a_link_to_nothing_is_told():
    with pytest.raises(site_map.NoSuchPlaceError, match="there-is-none"):
        site_map.turned("cli.md", "[x](there-is-none.md)")
    with pytest.raises(site_map.NoSuchPlaceError):
        site_map.turned("cli.md", "[x](../../../etc/passwd)")
    assert site_map.turned("cli.md", "```\n[x](none.md)\n```\n[a](#b)") == "```\n[x](none.md)\n```\n[a](#b)"
    assert site_map.turned("index.md", "[x](docs/cli.md#a)") == "[x](cli.md#a)"
    assert site_map.turned("operating/systemd.md", "[x](../../deploy/systemd)") == "[x](files/systemd.md)"


def test_every_key_of_the_configuration_has_its_row_default_and_meaning():
    table = MADE["reference/configuration.md"].partition("## A voter")[0]
    rows = {
        row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", table, re.MULTILINE)
    }
    assert list(rows) == [field.name for field in dataclasses.fields(Config)]
    assert all(meaning for _, _, meaning in rows.values())
    assert rows["chunk_bytes"][:2] == ("whole number, bytes", "`4MiB`")
    assert rows["lease_s"][:2] == ("number, seconds", "`0.6`")
    assert rows["insecure"][:2] == ("`true` or `false`", "`false`")
    assert rows["raft_key_file"][:2] == ("path, or none", "none")
    assert rows["voters"][0] == "list of [voters](#a-voter)"
    assert "its key" in rows["tls_key_file"][2].lower(), "one comment stands for three keys"
    for field in dataclasses.fields(Config):
        if (
            isinstance(field.default, int | float)
            and not isinstance(field.default, bool)
            and field.default < 1 << 20
        ):
            assert rows[field.name][1] == f"`{field.default}`"


def test_every_command_and_option_is_in_the_reference():
    text = MADE["reference/command-line.md"]
    for path, command in site_reference.commands(cli):
        assert f"\n## {' '.join(path)}\n" in text
        body = text.partition(f"\n## {' '.join(path)}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert all(name in body for name in parameter.opts), (path, parameter.name)
    assert "usage: fastcheckd" in text


def test_what_is_shown_of_python_exists():
    """By the files alone: some of it needs frameworks that are not installed."""
    for names in site_reference.PYTHON.values():
        for name in names:
            module, _, last = name.rpartition(".")
            file = ROOT / "client" / Path(*name.split("."))
            if file.with_suffix(".py").is_file() or (file / "__init__.py").is_file():
                continue
            source = (ROOT / "client" / Path(*module.split("."))).with_suffix(".py").read_text()
            assert re.search(rf"^(?:class|def) {last}\b", source, re.MULTILINE), name


def test_nothing_comes_from_elsewhere():
    assert SITE["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & set(SITE)
