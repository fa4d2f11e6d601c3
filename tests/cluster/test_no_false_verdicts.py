"""Eight nodes on a machine whose cores are all taken: nobody who lives is called DOWN."""

import pytest
from tests.benchmarks.detection import soak

MINUTES = 2.0


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_nobody_is_called_down_in_two_minutes_of_saturated_cores():
    down, suspected = soak(MINUTES, say=print)
    assert down.runs == [0.0], f"{down.runs[0]:g} times DOWN, {suspected.runs[0]:g} times SUSPECT"
