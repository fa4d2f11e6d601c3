"""Settings that hold for every test."""

import os

import pytest
from hypothesis import settings

# Threads of torch wait for each other by spinning. Here ranks are threads and processes that share the cores with
# whole clusters, and what spins takes them from whoever has work. `torchrun` says the same to more than one rank.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Begun first: in the end no worker is left alone with one of them.
LONG_FILES = {
    *("test_without_quorum.py", "test_repair.py", "test_torchrun.py", "test_dcp_ranks.py"),
    *("test_admin_of_a_cluster.py", "test_attacks.py", "test_upgrading.py", "test_detection.py"),
    *("test_readme.py", "test_g6_outages.py", "test_attacks_by_trainers.py", "test_kills.py"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first; each worker takes one whole file after the other."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


# The machine may be shared and noisy: an input is wrong or right, never too slow.
settings.register_profile("fastcheck", deadline=None, print_blob=True)
settings.load_profile("fastcheck")
