"""The Makefile runs every test file, once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_is_in_exactly_one_of_the_two_runs():
    text = (ROOT / "Makefile").read_text()
    (clusters,) = re.findall(r"^CLUSTERS := (.+)$", text, re.MULTILINE)
    assert all((ROOT / folder).is_dir() for folder in clusters.split())
    runs = re.findall(r"^\t\$\(BIN\)/python -m pytest (.+)$", text, re.MULTILINE)
    assert len(runs) == 2
    assert runs[0].endswith(" $(CLUSTERS)"), "these folders and no other"
    assert runs[1].endswith(" $(CLUSTERS:%=--ignore=%)"), "all but these folders"
    (together,) = re.findall(r"^test: .*\n\t(.+)$", text, re.MULTILINE)
    assert together.endswith(" test-clusters test-rest")
