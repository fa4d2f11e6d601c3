"""The demo's training: the model's size, batches that depend on nothing but their place, and real ranks."""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.forks import popen

from fastcheck.demo import TrainSettings, ranks
from fastcheck.demo.model import GPT, batch, corpus, parameter_count
from fastcheck.demo.ranks import RankGroup
from fastcheck.demo.report import RunRecord

SMALL = TrainSettings(steps=3, width=32, layers=2, heads=2, context=16, batch=1)


def test_the_demo_trains_at_least_five_million_parameters():
    s = TrainSettings()
    with torch.device("meta"):
        model = GPT(width=s.width, heads=s.heads, layers=s.layers, context=s.context, dropout=s.dropout)
    assert parameter_count(model) >= 5_000_000


def test_the_model_cannot_look_ahead():
    torch.manual_seed(0)
    model = GPT(width=32, heads=2, layers=2, context=16, dropout=0.0)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    assert torch.equal(one[:, :10], other[:, :10])
    assert not torch.equal(one[:, 10:], other[:, 10:])


TEXT = corpus(1 << 16)


@given(step=st.integers(0, 10**6), rank=st.integers(0, 1000))
def test_a_batch_is_a_function_of_its_place(step, rank):
    place = {"seed": 7, "step": step, "rank": rank, "size": 2, "context": 16}
    inputs, targets = batch(TEXT, **place)
    again, _ = batch(TEXT, **place)
    assert torch.equal(inputs, again)
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    elsewhere, _ = batch(TEXT, **{**place, "step": step + 1})
    assert not torch.equal(inputs, elsewhere)


def test_the_corpus_is_the_standard_library_and_always_the_same():
    assert torch.equal(corpus(1 << 16), TEXT)
    assert b"import" in bytes(TEXT.tolist())


def test_settings_survive_the_command_line():
    assert TrainSettings.parse([*SMALL.arguments(), "--digest-at=4"]) == (SMALL, ["--digest-at=4"])


@pytest.fixture
def forked(monkeypatch):
    """Ranks that need not import torch once more."""
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))


def train(tmp_path, name, *, digest_at=None):
    run = RunRecord()
    with RankGroup(SMALL, None, 2, tmp_path, name=name, digest_at=digest_at) as group:
        for rank in range(2):
            group.start(rank)
            group.begin(rank)
        running = 2
        events = group.events(timeout_s=90)
        while running:
            event = next(events)
            run.take(event)
            if event["event"] == "ended":
                assert event["code"] == 0, group.log_tails()
                running -= 1
    return run


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forked")
def test_two_ranks_train_the_same_bits_twice(tmp_path):
    one, two = train(tmp_path, "one", digest_at=2), train(tmp_path, "two", digest_at=3)
    assert len(one.losses) == 6
    assert one.losses == two.losses
    assert one.final == two.final
    assert len(set(one.final.values())) == 2, "each rank has its own part of the state"
    assert one.probed != one.final
    assert two.probed == two.final, "the state after the last step is the final one"
    assert (one.bytes_raw, one.committed_step) == (0, 0), "nothing is saved when FastCheck is off"


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
