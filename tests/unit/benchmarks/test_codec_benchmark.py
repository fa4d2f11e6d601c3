"""The benchmark's own arithmetic: a goal is missed or met, a setting passes or fails, others give the bytes back."""

from __future__ import annotations

import numpy as np
import pytest
from tests.benchmarks.codec_rows import Rate
from tests.benchmarks.compressors import COMPRESSORS, Compressor
from tests.benchmarks.goals import ADJACENT, DISTANT, DISTANT_LOSSY, Goal, goal_of
from tests.benchmarks.seed_noise import Experiment, Outcome


def test_a_goal_is_met_at_its_value_and_missed_below():
    goal = Goal(3.5, 1.0, 1.5)
    assert goal.missed(3.5, 1.0, 1.5) == []
    assert len(goal.missed(3.49, 1.0, 1.49)) == 2
    assert DISTANT.missed(1.3, 0.01, 0.01) == []  # no goal for rates


def test_goals_by_kind_gap_and_loss():
    assert goal_of("AdamW, fp32", 1, lossy=False) is ADJACENT["AdamW, fp32"]
    assert goal_of("SGD with momentum", 10, lossy=False) is DISTANT
    assert goal_of("AdamW, fp32", 10, lossy=True) is DISTANT_LOSSY
    assert goal_of("AdamW, fp32", 1, lossy=True) is None


def test_a_rate_is_the_median_of_its_rounds():
    rate = Rate(2_000_000_000, [4.0, 1.0, 2.0])
    assert rate.gbps == 1.0
    assert str(rate) == "1.00 (0.50 to 2.00)"


@pytest.mark.parametrize(
    ("differences", "passes"),
    [
        ([0.0, 0.0, 0.0], True),
        ([1e-4, -1e-4, 1e-4], True),
        ([2e-4, 2e-4, 2e-4], False),
        ([2e-4, -2e-4, 0.0], False),  # does no harm on average, but moves most seeds
        ([0.0, 0.0, 9e-4], False),  # most seeds stay, but the average moves
    ],
)
def test_a_setting_passes_within_a_hundredth_of_the_noise(differences: list[float], passes: bool):
    experiment = Experiment([2.00, 2.01, 2.02], [])
    assert experiment.noise == pytest.approx(0.01)
    assert experiment.passes(Outcome("setting", differences)) is passes


@pytest.mark.parametrize("peer", COMPRESSORS, ids=[peer.name for peer in COMPRESSORS])
@pytest.mark.parametrize("size", [1, 64, 100_000])
def test_others_give_the_bytes_back(peer: Compressor, size: int):
    data = np.random.default_rng(0).normal(size=size).astype(np.float32).view(np.uint8)
    out = np.zeros_like(data)
    peer.decompress(peer.compress(data, 4), out)
    assert (out == data).all()
