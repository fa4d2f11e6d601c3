"""A served world for the tests of the admin client and the command line."""

import pytest

from .admin_world import AdminServer, World


@pytest.fixture
def world():
    return World()


@pytest.fixture
def address(world):
    with AdminServer(world) as server:
        yield server.address
