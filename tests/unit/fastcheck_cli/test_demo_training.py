"""The ranks of the demo: settings on their command line, and an end when nobody steers them any more."""

import pytest

from fastcheck.demo import TrainSettings
from fastcheck.demo.ranks import RankGroup

SMALL = TrainSettings(steps=3, width=32, layers=2, heads=2, context=16, batch=1)


def test_settings_survive_the_command_line():
    assert TrainSettings.parse([*SMALL.arguments(), "--digest-at=4"]) == (SMALL, ["--digest-at=4"])


@pytest.mark.timeout(60)
def test_a_rank_ends_when_its_launcher_is_gone(tmp_path):
    with RankGroup(SMALL, None, 1, tmp_path, name="alone") as group:
        group.start(0)
        events = group.events(timeout_s=50)
        assert next(events)["event"] == "ready"
        group._processes[0].stdin.close()
        ended = next(events)
        assert (ended["event"], ended["code"]) == ("ended", 1)
        assert "launcher is gone" in group.log_tails()
