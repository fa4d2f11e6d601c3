"""Real clusters whose nodes are apart. Every test gets one of its own; without root all of them skip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.netlab.lab import Lab
from tests.netlab.wires import why_not


@pytest.fixture(scope="session")
def network_namespaces() -> None:
    """Skips what needs them where there are none."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def make_lab(tmp_path: Path, network_namespaces: None) -> Iterator[Callable[..., Lab]]:
    """Starts a cluster of so many nodes, with the daemon's config keys as keywords."""
    with contextlib.ExitStack() as stack:
        yield lambda nodes, **settings: stack.enter_context(Lab(tmp_path, nodes, **settings))
