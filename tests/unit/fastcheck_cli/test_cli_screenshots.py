"""The pictures in docs/cli.md: each view has one, it is shown, and it fetches nothing from elsewhere."""

import re
import xml.etree.ElementTree as ET

import pytest
from tests.cluster import screenshots


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
