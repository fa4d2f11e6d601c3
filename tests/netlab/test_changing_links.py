"""A link whose rate changes tenfold in the middle of a job: steps keep to the pace of the link that there is."""

import time

import pytest
import torch
from tests.cluster.harness import until

from fastcheck import Checkpointer

pytestmark = pytest.mark.usefixtures("network_namespaces")

OWNER = "node-0"
FLOATS = 8 << 20
SLOW_MBIT_PER_S, FAST_MBIT_PER_S = 100, 1000
#: A step may take this many times what its raw bytes take on the link, and a little for a machine with other work.
TIMES, NOISE_S = 1.5, 1.5


def raw_s(mbit_per_s):
    return 4 * FLOATS * 8 / (mbit_per_s * 1e6)


def test_a_link_that_changes_tenfold_in_the_middle_of_a_job(make_lab):
    lab = make_lab(3, tolerate=1, spread=1)
    state = {"w": torch.randn(FLOATS, generator=torch.Generator().manual_seed(1))}
    took, ratios, step = {}, {}, 0
    with Checkpointer("gpt", rank=0, world_size=1, address=lab.address(OWNER)) as ckpt:
        until(lambda: ckpt.steps() == [], "the daemon")
        for phase, rate in enumerate((FAST_MBIT_PER_S, SLOW_MBIT_PER_S, FAST_MBIT_PER_S)):
            lab.network.shape(OWNER, rate)
            took[phase], ratios[phase] = [], []
            for _ in range(5):
                step += 1
                state["w"] *= 1 + 1e-6  # a little of each number changes, as in training
                wanted = state["w"].clone()
                began = time.monotonic()
                handle = ckpt.save(step, state).result(timeout=120)
                took[phase].append(time.monotonic() - began)
                ratios[phase].append(handle.stats["ratio"])
        for phase, rate in ((1, SLOW_MBIT_PER_S), (2, FAST_MBIT_PER_S)):
            # From the third step on the change is known.
            assert max(took[phase][2:]) <= TIMES * raw_s(rate) + NOISE_S, (took, ratios)
        assert max(took[1][2:]) < raw_s(SLOW_MBIT_PER_S), f"a slow link has steps encoded: {took}, {ratios}"
        assert min(ratios[1][2:]) > 1.2, ratios
        found = {"w": torch.zeros(FLOATS)}
        assert ckpt.load(found) == step
        assert torch.equal(found["w"].view(torch.int32), wanted.view(torch.int32))
    lab.network.heal()
    lab.kill(OWNER, wipe=True)
    with Checkpointer("gpt", rank=0, world_size=1, address=lab.address("node-2")) as ckpt:
        found = {"w": torch.zeros(FLOATS)}
        assert ckpt.load(found) == step
        assert torch.equal(found["w"].view(torch.int32), wanted.view(torch.int32))
