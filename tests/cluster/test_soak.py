"""Half a minute of the soak (`make soak`): nothing that was promised is broken, whatever falls."""

import json
import os
import random

import pytest
from tests.soak.run import soak

SEED = int(os.environ.get("FASTCHECK_SOAK_SEED", str(random.randrange(10**6))))


@pytest.mark.alone
def test_half_a_minute_of_faults_breaks_no_promise(tmp_path):
    account = soak(30, SEED, tmp_path, say=print)
    assert not account.violations, json.dumps(account.as_json(), indent=2) + f"\nFASTCHECK_SOAK_SEED={SEED}"
    assert sum(account.faults.values()) >= 3 and account.commits >= 5 and account.loads >= 3
