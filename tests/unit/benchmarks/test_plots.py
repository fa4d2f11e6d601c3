"""Pictures are made from the JSON alone, always the same, and say what was not run."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.benchmarks.plots import charts, main, write_plots
from tests.benchmarks.report import Figure
from tests.benchmarks.resident import directory_bytes, status_bytes
from tests.benchmarks.svg import LABEL_WIDTH, PLOT_WIDTH, Bar, Chart, Group, Scale, draw, scale_of

RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks"


def texts(picture: str) -> list[str]:
    """All that is written in a picture; it must be well-formed."""
    return [
        found.text or "" for found in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_a_bar_starts_at_zero_and_a_median_is_where_its_value_is():
    scale = Scale(0.0, 10.0, logarithmic=False)
    assert scale.x(0.0) == LABEL_WIDTH
    assert scale.x(5.0) == LABEL_WIDTH + PLOT_WIDTH / 2
    assert scale.ticks() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_logarithmic_scale_gives_every_tenfold_the_same_room():
    scale = Scale(0.1, 10.0, logarithmic=True)
    assert scale.x(1.0) == LABEL_WIDTH + PLOT_WIDTH / 2
    assert scale.ticks() == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])


@pytest.mark.parametrize(
    ("medians", "logarithmic"), [([1.0, 5.0], False), ([1.0, 40.0], True), ([0.0, 40.0], False), ([], False)]
)
def test_a_scale_is_logarithmic_where_medians_are_far_apart_and_above_zero(
    medians: list[float], logarithmic: bool
):
    assert scale_of(medians, medians).logarithmic is logarithmic


def test_a_chart_says_median_and_spread_and_draws_a_bar_or_a_dot():
    near = draw(Chart("Title", "ms", [Group("", [Bar("A", [1.0, 3.0, 2.0], ours=True), Bar("B", [4.0])])]))
    assert "2 (1 to 3)" in texts(near)
    assert near.count("<rect") == 3  # the paper and two bars
    assert "<circle" not in near
    far = draw(Chart("Title", "ms", [Group("", [Bar("A", [1.0]), Bar("B", [1234.0])])]))
    assert far.count("<circle") == 2
    assert "1234 (1234 to 1234)" in texts(far)
    assert "ms: median, lowest to highest; logarithmic" in texts(far)


def test_the_same_figures_give_the_same_picture_and_labels_cannot_break_it():
    chart = Chart(
        '<&"title">',
        "s",
        [Group("<g>", [Bar("a < b & c", [1.0]), Bar("none", text="not run: x < y")])],
        (1.0, "1"),
    )
    assert draw(chart) == draw(chart)
    assert {"a < b & c", "not run: x < y", "<g>"} <= set(texts(draw(chart)))


def peers(reason: str = "") -> dict[str, object]:
    start = {
        "state_bytes": 8, "first_blocked_s": 6.0, "first_memcpy_s": 2.0, "memcpy_s": [1.0], "blocked_s": [3.0],
        "safe_s": [5.0], "restore_s": [0.5], "extra_s": {}, "wrong_rounds": 1, "first_wrong": "a",
    }  # fmt: skip
    row = {"key": "x", "title": "X", "safe": "in memory", "versions": {}, "starts": [start], "reason": ""}
    return {"side_by_side": [row, row | {"title": "Y", "starts": [], "reason": reason}]}


def test_side_by_side_gives_a_picture_per_figure_in_which_nobody_is_left_out():
    found = {name: texts(draw(chart)) for name, chart in charts(peers("it could not be installed"))}
    assert list(found) == ["peers-first", "peers-blocked", "peers-safe", "peers-restore"]
    for said in found.values():
        assert "not run: it could not be installed" in said
    assert "X" in found["peers-blocked"]
    assert "X, NOT IDENTICAL" in found["peers-restore"]


def test_a_long_reason_is_cut_in_the_picture():
    _, chart = next(iter(charts(peers("x" * 500))))
    assert max(len(said) for said in texts(draw(chart))) < 100


def test_growth_is_drawn_as_multiples_of_each_round_s_limit():
    figures = [
        Figure("growth in bytes: save blocks, 0.1 GB", "ms", [2.0, 9.0], [1.0, 3.0], "memcpy"),
        Figure("growth in bytes: save blocks, 1 GB", "ms", [20.0], [10.0], "memcpy"),
        Figure("growth in nodes: all ranks (1 Gbit/s each), 2 nodes", "s", [3.0], [2.0], "payload"),
        Figure("memory per node: highest (1 GB), keep_steps 2", "x the state", [2.5, 2.6, 2.7]),
    ]
    found = dict(charts({"figures": [figure.to_json() for figure in figures]}))
    assert list(found) == ["growth-size", "growth-nodes", "memory"]
    (group,) = found["growth-size"].groups
    assert (group.heading, [(bar.label, bar.runs) for bar in group.bars]) == (
        "save blocks", [("0.1 GB", [2.0, 3.0]), ("1 GB", [2.0])]
    )  # fmt: skip
    assert found["growth-nodes"].groups[0].bars[0].runs == [1.5]
    assert found["memory"].groups[0].heading == "highest (1 GB)"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2026-11-21-2-cores.json", ["transfer-blocking", "transfer-rates"]),
        ("2026-11-21-detection.json", ["detection"]),
        ("2026-11-21-links.json", ["links"]),
        ("2026-11-21-codec.json", ["codec"]),
    ],
)
def test_runs_that_are_in_the_documentation_can_be_drawn_again(
    name: str, expected: list[str], tmp_path: Path
):
    results = json.loads((RESULTS / name).read_text())
    paths = write_plots(results, tmp_path)
    assert [path.stem for path in paths] == expected
    for path in paths:
        assert len(texts(path.read_text())) > 5


def test_a_file_that_has_nothing_to_draw_is_an_error(tmp_path: Path):
    empty = tmp_path / "empty.json"
    empty.write_text('{"machine": {}}')
    with pytest.raises(SystemExit, match="nothing that can be drawn"):
        main([str(empty), "--out", str(tmp_path)])


# How much memory a node takes.


def test_shared_memory_is_left_out_of_a_process_resident_bytes():
    status = "VmRSS:\t     900 kB\nRssAnon:\t     100 kB\nRssFile:\t      20 kB\nRssShmem:\t     780 kB\n"
    assert status_bytes(status) == 120 * 1024


def test_a_hole_in_a_file_takes_no_memory(tmp_path: Path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "full").write_bytes(b"x" * 8192)
    assert 8192 <= directory_bytes(tmp_path) < 1 << 20
