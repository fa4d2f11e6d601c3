"""What the paper's experiment saves: models in training that go on bit for bit from where they were kept."""

from __future__ import annotations

import torch
from tests.benchmarks.paper_storage import why_not
from tests.benchmarks.paper_training import Ensemble, state_file, train


def test_a_rank_goes_on_from_a_stage_as_if_it_had_trained_all_along(tmp_path):
    threads = torch.get_num_threads()
    try:
        train(tmp_path, 5, [1, 2])
        once = Ensemble(tmp_path, [5])
        once.take_up(1)
        once.step()
        whole = Ensemble(tmp_path, [5])
        whole.take_up(2)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(once.parameters + once.moments, whole.parameters + whole.moments, strict=True):
        assert torch.equal(a, b)


def test_models_of_a_state_have_nothing_in_common(tmp_path):
    ensemble = Ensemble(tmp_path, [0, 1])
    half = len(ensemble.parameters) // 2
    for one, other in zip(ensemble.parameters[:half], ensemble.parameters[half:], strict=True):
        if one.dim() > 1:
            assert not (one == other).any()


def test_states_of_other_seeds_and_stages_have_other_names(tmp_path):
    assert len({state_file(tmp_path, seed, stage) for seed in (0, 1) for stage in (10, 200)}) == 4


def test_a_missing_storage_server_is_named_with_what_to_do(tmp_path):
    assert "make bench-paper-server" in why_not(tmp_path / "python")
