"""The Makefile runs every test file, once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_cluster_test_is_in_exactly_one_of_the_runs():
    patterns = re.findall(r"^CLUSTERS_\d := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(patterns) == 2
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert sorted(found) == sorted((ROOT / "tests" / "cluster").glob("test_*.py"))
