"""Settings that hold for every test."""

from pathlib import Path

import pytest
from hypothesis import settings

# The machine may be shared and noisy: an input is wrong or right, never too slow.
settings.register_profile("fastcheck", deadline=None, print_blob=True)
settings.load_profile("fastcheck")

_HERE = Path(__file__).parent
#: Tests with real daemons: one after the other, also where others run beside them (`pytest -n 2 --dist loadgroup`).
_REAL = (_HERE / "cluster", _HERE / "netlab")


def pytest_collection_modifyitems(items):
    for item in items:
        if any(folder in item.path.parents for folder in _REAL):
            item.add_marker(pytest.mark.xdist_group("real"))
