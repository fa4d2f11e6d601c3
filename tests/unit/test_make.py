"""The Makefile runs every test file, once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_is_in_exactly_one_of_the_runs():
    text = (ROOT / "Makefile").read_text()
    (folders,) = re.findall(r"^CLUSTERS := (.+)$", text, re.MULTILINE)
    assert all((ROOT / folder).is_dir() for folder in folders.split())
    runs = re.findall(r"^\t(?:nice -n 10 )?\$\(BIN\)/python -m pytest (.+)$", text, re.MULTILINE)
    rest, clusters, alone, long = runs
    assert rest.endswith(" -m 'not alone and not long' $(CLUSTERS:%=--ignore=%)"), "all but these folders"
    assert clusters.endswith(" -m 'not alone and not long' $(CLUSTERS)"), "these folders and no other"
    assert alone.endswith(" -m 'alone and not long' $(ALONE)"), "and what both leave out"
    (places,) = re.findall(r"^ALONE := (.+)$", text, re.MULTILINE)
    searched = [ROOT / place for place in places.replace("$(CLUSTERS)", folders).split()]
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "mark.alone" in path.read_text() and path != Path(__file__):
            assert any(path.is_relative_to(place) for place in searched), f"{path} is not run"
    assert " -m long " in long and long.endswith(" tests"), (
        "what no other run has, since pytest leaves it out by itself"
    )
    assert "-m 'not long'" in (ROOT / "pyproject.toml").read_text()
    (together,) = re.findall(r"^test: .*\n((?:\t.+\n)+)", text, re.MULTILINE)
    assert re.findall(r"test-\w+", together) == ["test-rest", "test-clusters", "test-alone"]
