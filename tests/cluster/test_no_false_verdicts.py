"""Eight nodes on a machine whose cores are all taken: nobody who lives is called DOWN."""

import pytest
from tests.benchmarks.detection import soak


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("minutes", [0.3, pytest.param(2.0, marks=pytest.mark.long)])
def test_nobody_is_called_down_while_all_cores_are_taken(minutes):
    down, suspected = soak(minutes, say=print)
    assert down.runs == [0.0], f"{down.runs[0]:g} times DOWN, {suspected.runs[0]:g} times SUSPECT"
