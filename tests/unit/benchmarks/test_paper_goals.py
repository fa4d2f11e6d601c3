"""The arithmetic of the paper's experiment: what is called a reduction, a ceiling, a goal met."""

from __future__ import annotations

import argparse

import pytest
from tests.benchmarks.paper_goals import (
    CHECKPOINT,
    COPY,
    EQUAL,
    HOLDERS,
    INDEX8,
    OURS,
    RECOVERY,
    REMOTE,
    Comparison,
    Run,
    Where,
    compare,
    goal_percent,
    payload_ceiling_bytes_per_s,
    possible_reduction_percent,
    reduction_percent,
)
from tests.benchmarks.paper_report import add_arguments, cores_said, limits, plan_of

AT_ONCE = Where(nodes=4, gbit_per_s=1.0, links=HOLDERS, stage=600)
STATE_BYTES = 240_000_000


def runs(what: str, system: str, seconds: list[float], moved: int = STATE_BYTES) -> list[Run]:
    return [
        Run(what, system, s, STATE_BYTES, moved if what != RECOVERY else 0, moved, 1.0, turn)
        for turn, s in enumerate(seconds)
    ]


def only(found: list[Comparison]) -> Comparison:
    assert len(found) == 1
    return found[0]


def test_a_reduction_is_what_the_baselines_time_shrinks_by():
    assert reduction_percent(2.158, 10.0) == pytest.approx(78.42)
    assert reduction_percent(3.0, 2.0) == -50.0
    assert possible_reduction_percent(4) == 75.0
    assert possible_reduction_percent(3.6 * 3) == pytest.approx(90.7, abs=0.05)


def test_a_link_carries_what_its_packets_leave_for_payload():
    assert payload_ceiling_bytes_per_s(1.0) == pytest.approx(0.9564 * 125e6, rel=1e-4)
    assert payload_ceiling_bytes_per_s(2.5) == pytest.approx(2.5 * payload_ceiling_bytes_per_s(1.0))


def test_medians_are_compared_and_the_spread_is_that_of_rounds():
    found = only(
        compare(
            AT_ONCE,
            runs(CHECKPOINT, OURS, [1.0, 5.0, 2.0]) + runs(CHECKPOINT, COPY, [10.0, 10.0, 8.0]),
        )
    )
    assert found.reduction(COPY) == 80.0
    assert found.reductions(COPY) == [90.0, 50.0, 75.0]


def test_what_is_possible_grows_with_holders_only_where_their_links_are_the_limit():
    third = runs(CHECKPOINT, OURS, [1.0], STATE_BYTES // 3) + runs(CHECKPOINT, COPY, [9.0])
    assert only(compare(AT_ONCE, third)).possible == pytest.approx(100 * (1 - 1 / 9))
    equal = Where(4, 1.0, EQUAL, 600)
    assert only(compare(equal, third)).possible == pytest.approx(100 * (1 - 1 / 3))


def test_a_goal_counts_against_the_better_baseline_and_is_met_at_its_value():
    baselines = runs(CHECKPOINT, COPY, [10.0]) + runs(CHECKPOINT, REMOTE, [20.0])
    met = only(compare(AT_ONCE, runs(CHECKPOINT, OURS, [1.5]) + baselines))
    assert (met.better_baseline, met.goal, met.met) == (COPY, 85.0, True)
    missed = only(compare(AT_ONCE, runs(CHECKPOINT, OURS, [1.6]) + baselines))
    assert missed.reduction(REMOTE) > 85.0
    assert missed.met is False


@pytest.mark.parametrize(
    ("what", "system", "nodes", "links", "goal"),
    [
        (CHECKPOINT, OURS, 4, HOLDERS, 85.0),
        (CHECKPOINT, OURS, 8, EQUAL, 70.0),
        (RECOVERY, OURS, 5, HOLDERS, 78.0),
        (RECOVERY, INDEX8, 5, HOLDERS, 85.0),
        (RECOVERY, OURS, 8, HOLDERS, 86.0),
        (RECOVERY, OURS, 4, HOLDERS, None),
        (RECOVERY, OURS, 8, EQUAL, None),
        (RECOVERY, INDEX8, 8, HOLDERS, None),
    ],
)
def test_a_goal_is_set_for_its_links_and_its_number_of_holders(what, system, nodes, links, goal):
    assert goal_percent(what, system, Where(nodes, 1.0, links, 10)) == goal


def test_the_share_of_the_ceiling_is_of_what_really_crossed_the_receivers_link():
    equal = Where(4, 1.0, EQUAL, 600)
    seconds = STATE_BYTES / 2 / (0.96 * payload_ceiling_bytes_per_s(1.0))
    halved = runs(RECOVERY, OURS, [seconds], STATE_BYTES // 2)
    found = only(compare(equal, halved + runs(RECOVERY, COPY, [2.0])))
    assert found.codec_ratio == 2.0
    assert found.ceiling_share == pytest.approx(0.96)
    assert found.holders_gain is None
    assert "MISSED" not in limits(found)
    slower = runs(RECOVERY, OURS, [seconds * 1.02], STATE_BYTES // 2)
    assert "MISSED 95 %" in limits(only(compare(equal, slower + runs(RECOVERY, COPY, [2.0]))))


def test_what_more_holders_bring_is_counted_without_what_the_codec_brings():
    half_the_bytes = runs(RECOVERY, OURS, [0.4], STATE_BYTES // 2)
    found = only(compare(AT_ONCE, half_the_bytes + runs(RECOVERY, COPY, [2.0])))
    assert found.reduction(COPY) == 80.0
    assert found.holders_gain == pytest.approx(2.5)
    assert "MISSED 2.9" in limits(found)


def test_a_baseline_that_was_not_run_is_missing_and_nothing_is_made_up_for_it():
    found = only(compare(AT_ONCE, runs(CHECKPOINT, OURS, [1.0]) + runs(CHECKPOINT, COPY, [4.0])))
    assert set(found.baselines) == {COPY}
    assert found.to_json()["reductions_percent"] == {COPY: 75.0}
    assert compare(AT_ONCE, runs(CHECKPOINT, OURS, [1.0])) == []


def test_a_scale_model_names_its_true_rate_and_what_it_stands_for():
    where = Where(4, 0.25, EQUAL, 600, link_scale=0.1)
    assert str(where) == "4 nodes, 0.25 Gbit/s (scale model of 2.5), equal links, step 600"
    seconds = STATE_BYTES / payload_ceiling_bytes_per_s(0.25)
    found = only(compare(where, runs(RECOVERY, OURS, [seconds]) + runs(RECOVERY, COPY, [seconds])))
    assert found.ceiling_share == pytest.approx(1.0), "limits are those of the true rate"
    assert "are at the full rate" in cores_said(4, 2, 0.1)
    assert "5 cores" in cores_said(4, 2, 0.1)
    assert cores_said(4, 2, 1.0) == "4 nodes shared 2 cores: 0.5 each"


def plan(*arguments: str):
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    add_arguments(parser)
    return plan_of(parser.parse_args(arguments))


def test_a_part_of_the_experiment_can_be_asked_for():
    whole = plan()
    assert whole.layouts == {4: (EQUAL, HOLDERS), 5: (HOLDERS,), 8: (EQUAL, HOLDERS)}
    assert (whole.models, whole.stages, whole.link_scale) == (6, (10, 200, 600), 1.0)
    some = plan(
        *(
            "--paper-nodes",
            "4",
            "5",
            "--paper-links",
            HOLDERS,
            "--paper-gbits",
            "1",
            "--paper-link-scale",
            "0.1",
        ),
        *(
            "--paper-stages",
            "600",
            "10",
            "--paper-models",
            "2",
            "--paper-rounds",
            "3",
            "--paper-recoveries",
            "2",
        ),
    )
    assert some.layouts == {4: (HOLDERS,), 5: (HOLDERS,)}
    assert (some.gbits_per_s, some.link_scale, some.stages) == ((1.0,), 0.1, (10, 600))
    assert (some.models, some.rounds, some.recoveries) == (2, 3, 2)
    with pytest.raises(SystemExit, match="nothing to run"):
        plan("--paper-nodes", "5", "--paper-links", EQUAL)
