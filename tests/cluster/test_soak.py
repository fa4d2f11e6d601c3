"""Short soaks: nothing that was promised is broken, whatever falls; nobody is called DOWN, however busy the cores."""

import json
import os
import random

import pytest
from tests.benchmarks import detection
from tests.soak.run import soak

SEED = int(os.environ.get("FASTCHECK_SOAK_SEED", str(random.randrange(10**6))))


@pytest.mark.alone
def test_half_a_minute_of_faults_breaks_no_promise(tmp_path):
    account = soak(30, SEED, tmp_path, say=print)
    assert not account.violations, json.dumps(account.as_json(), indent=2) + f"\nFASTCHECK_SOAK_SEED={SEED}"
    assert sum(account.faults.values()) >= 3 and account.commits >= 5 and account.loads >= 3


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("minutes", [0.3, pytest.param(2.0, marks=pytest.mark.long)])
def test_nobody_is_called_down_while_all_cores_are_taken(minutes):
    down, suspected = detection.soak(minutes, say=print)
    assert down.runs == [0.0], f"{down.runs[0]:g} times DOWN, {suspected.runs[0]:g} times SUSPECT"
