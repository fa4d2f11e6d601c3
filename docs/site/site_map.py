"""What of the repository is where on the site. Decides, and needs nothing of MkDocs.

Pages are written to be read on a code host, where a link may lead anywhere in the repository. On the site, what lies
below `docs/` stays where it is, and what is linked from there and lies elsewhere is brought in: pages, folders of
files as one page each, and single files as they are. Links are turned to where things are then.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]

#: Pages of the repository that lie outside of docs: where they are on the site → where they are.
PAGES = {
    "index.md": "README.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "reporting.md": "SECURITY.md",
    "operating/deploying.md": "deploy/README.md",
}
#: Folders that are one page each, with all files in it.
FOLDERS = {
    "operating/files/systemd.md": "deploy/systemd",
    "operating/files/kubernetes.md": "deploy/kubernetes",
}
#: Single files lie below this, under their own paths.
FILES = "files"

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


class NoSuchPlaceError(Exception):
    """A link leads to what is not in the repository."""


def slug(heading: str, _separator: str = "-") -> str:
    """A heading's anchor, as code hosts spell it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def in_repository(page: str) -> str:
    """Where a page of the site lies in the repository."""
    return PAGES.get(page) or FOLDERS.get(page) or f"docs/{page}"


def on_site(path: str) -> str:
    """Where something of the repository lies on the site."""
    for here, there in (PAGES | FOLDERS).items():
        if path == there:
            return here
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FILES}/{path}"


def links(markdown: str) -> list[str]:
    """The relative links of a page."""
    return [link for link in _LINK.findall(_FENCE.sub("", markdown)) if not re.match(r"[a-z]+:|#", link)]


def brought_in(pages: dict[str, str]) -> set[str]:
    """Single files outside of docs that are linked from these pages (on the site → markdown)."""
    targets = {_target(page, link)[0] for page, text in pages.items() for link in links(text)}
    known = {*PAGES.values(), *FOLDERS.values()}
    return {path for path in targets if not path.startswith("docs/") and path not in known}


def turned(page: str, markdown: str) -> str:
    """A page's markdown with its links as they are on the site.

    Raises:
        NoSuchPlaceError: one leads nowhere.
    """

    def turn(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", match[0]):
            return match[0]
        path, anchor = _target(page, match[0])
        here = posixpath.relpath(on_site(path), posixpath.dirname(page) or ".")
        return here + (f"#{anchor}" if anchor else "")

    return _outside_fences(markdown, lambda text: _LINK.sub(turn, text))


def folder_page(folder: str) -> str:
    """All files in a folder of the repository, as one page."""
    parts = [f"# {folder}\n\nThe files as they are in the repository.\n"]
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file():
            language = {".yaml": "yaml"}.get(path.suffix, "ini")
            name = path.relative_to(ROOT / folder).as_posix()
            parts.append(f"## {name}\n\n```{language}\n{path.read_text().rstrip()}\n```\n")
    return "\n".join(parts)


def _target(page: str, link: str) -> tuple[str, str]:
    """Where in the repository a link leads, and the anchor there."""
    path, _, anchor = link.partition("#")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), path))
    if PurePosixPath(found).parts[0] == os.pardir or not (ROOT / found).exists():
        raise NoSuchPlaceError(f"{in_repository(page)}: {link}")
    return found, anchor


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(markdown[at:])])
