"""The demo's verdict must notice every kind of difference; its figures must add up."""

import pytest
from rich.console import Console

from fastcheck.demo import display
from fastcheck.demo.display import DemoView, RunProgress, sparkline
from fastcheck.demo.report import RunRecord, Timeline, compare, summary

RANKS, STEPS, RESTORED = 2, 6, 3


def loss(step, rank):
    return float(step + rank / 10).hex()


def step_event(step, rank, at_s=0.0):
    return {
        "event": "step",
        "rank": rank,
        "step": step,
        "loss": loss(step, rank),
        "stall_ms": 4.0,
        "memcpy_ms": 2.0,
        "at_s": at_s,
    }


def saved_event(step, rank, *, committed=True):
    return {
        "event": "saved",
        "rank": rank,
        "step": step,
        "committed": committed,
        "bytes": 100,
        "encoded_bytes": 50,
        "stage_ms": 1.0,
    }


def record(steps, *, ranks=RANKS, first_at_s=0.0):
    run = RunRecord()
    for rank in range(ranks):
        run.take({"event": "ready", "rank": rank, "params": 5_000_000})
        for step in steps:
            run.take(step_event(step, rank, first_at_s + step))
            run.take(saved_event(step, rank))
    return run


@pytest.fixture
def runs():
    """A run that lost a node after step 4 and went on from step 3, and its reference: all as it should be."""
    before, after, reference = record([1, 2, 3, 4]), record([4, 5, 6], first_at_s=100), record(range(1, 7))
    before.committed_step = 3
    for rank in range(RANKS):
        after.take(
            {
                "event": "loaded",
                "rank": rank,
                "step": RESTORED,
                "digest": f"mid{rank}",
                "load_s": 0.5,
                "at_s": 101 + rank,
            }
        )
        after.take({"event": "done", "rank": rank, "digest": f"end{rank}"})
        reference.take({"event": "digest", "rank": rank, "digest": f"mid{rank}"})
        reference.take({"event": "done", "rank": rank, "digest": f"end{rank}"})
    return before, after, reference


def verdict(runs):
    return compare(*runs, ranks=RANKS, steps=STEPS)


def test_identical_runs(runs):
    found = verdict(runs)
    assert (found.bit_identical, found.losses_identical, found.reasons) == (True, True, ())


def lost_step(runs):
    """G1: what any rank saw committed before the loss must be there after it."""
    runs[0].committed_step = 4


def no_digests(kind):
    return lambda runs: [getattr(run, kind).clear() for run in runs]


#: What is changed in one of the runs; whether bits and losses are the same then; a reason.
DIFFERENCES = {
    "another final state": (lambda r: r[1].final.update({1: "other"}), False, True, "rank 1"),
    "another loaded state": (lambda r: r[1].loaded.update({0: (RESTORED, "other")}), False, True, ""),
    "no final digests": (no_digests("final"), False, True, ""),
    "no digests of the loaded step": (no_digests("probed"), False, True, ""),
    "the last bit of a loss": (
        lambda r: r[1].losses.update({(5, 1): (float.fromhex(loss(5, 1)) + 2**-50).hex()}), True, False, "steps 5",
    ),
    "a step that nobody trained": (lambda r: r[1].losses.pop((6, 0)), True, False, ""),
    "ranks that loaded different steps": (
        lambda r: r[1].loaded.update({1: (2, "mid1")}), False, True, "did not all load one step",
    ),
    "nothing loaded": (
        lambda r: r[1].loaded.update(dict.fromkeys(range(RANKS), (None, None))), False, True, "",
    ),
    "a committed step that was lost": (lost_step, False, True, "step 4 had been committed"),
    "one step with two losses": (lambda r: r[0].take(step_event(4, 0) | {"loss": loss(9, 9)}), True, False, ""),
}  # fmt: skip


@pytest.mark.parametrize(("change", "bits", "losses", "reason"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_every_difference_is_noticed(runs, change, bits, losses, reason):
    change(runs)
    found = verdict(runs)
    assert (found.bit_identical, found.losses_identical) == (bits, losses)
    assert found.reasons and reason in found.reasons[0]


def the_summary(runs, timeline=None):
    return summary(
        runs[0],
        runs[1],
        verdict(runs),
        timeline or Timeline(killed_at_s=90, detected_at_s=92),
        nodes=4,
        ranks=RANKS,
        steps=STEPS,
        killed_node="node-1",
        killed_at_step=4,
    )


def test_the_summary_has_the_promised_keys_and_parts_that_add_up(runs):
    found = the_summary(runs)
    promised = (
        "nodes, ranks, params, steps, killed_node, killed_at_step, restored_step, bit_identical, "
        "losses_identical, save_stall_ms, memcpy_ms, recovery_s, detection_s, bytes_raw, bytes_sent, ratio"
    )
    assert set(promised.split(", ")) <= set(found)
    parts = ("detection_s", "restart_s", "load_s", "first_step_s")
    assert sum(found[part] for part in parts) == pytest.approx(found["recovery_s"]) == 14
    assert (found["restored_step"], found["save_stall_ms"], found["memcpy_ms"]) == (3, 4.0, 2.0)
    assert (found["bytes_raw"], found["bytes_sent"], found["ratio"]) == (1400, 700, 2.0)


def test_the_ratio_is_that_of_all_committed_steps(runs):
    assert RunRecord().ratio is None
    assert runs[0].ratio == 2.0
    runs[0].take(saved_event(9, 0) | {"bytes": 1000, "encoded_bytes": 50})
    assert runs[0].ratio == 1800 / 450
    assert "times smaller" in text_of(display.summary(the_summary(runs)))


def test_steps_that_were_not_committed_do_not_count_as_sent(runs):
    runs[0].take(saved_event(9, 0, committed=False))
    assert the_summary(runs)["bytes_raw"] == 1400


def text_of(renderable):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(renderable)
    return console.export_text()


def test_the_summary_for_people_says_identical_only_when_it_is(runs):
    assert "✔ identical bit for bit" in text_of(display.summary(the_summary(runs)))
    runs[1].final[1] = "other"
    shown = text_of(display.summary(the_summary(runs)))
    assert "✘ NOT identical" in shown
    assert "rank 1" in shown


def test_the_screen_shows_nodes_runs_and_story():
    screen = DemoView(leader="node-0", lost_node="node-1")
    node = {"voter": True, "ram_used_bytes": 1 << 20}
    screen.nodes = [{"node_id": f"node-{i}", "state": "UP", **node} for i in range(2)]
    screen.runs.append(RunProgress("training", 20, step=7, committed=6, ratio=3.25, losses=[5.0, 4.0]))
    screen.story.append((1.5, "something happened", ""))
    shown = text_of(display.render(screen))
    for words in (
        "★ leader",
        "KILLED",
        "step  7 of 20",
        "committed 6",
        "sent 1/3.2",
        "1.0 MiB",
        "1.5 s  something happened",
    ):
        assert words in shown, words


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([3.0]) == "▁"
    assert sparkline([1.0, 3.0, 1.0]) == "▁█▁"
    assert len(sparkline(list(range(100)))) == 24
