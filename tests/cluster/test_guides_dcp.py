"""The guide's example for torch.distributed.checkpoint: killed, resumed, and left without a daemon."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

from tests.cluster.guides import NODE, begun, losses_in, newest_commit
from tests.cluster.harness import until
from tests.cluster.torchrun import Launcher

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "guides" / "dcp.md"
STEPS = 60


def options() -> list[object]:
    """Those of the command in the guide."""
    (line,) = re.findall(r"^torchrun (.*)$", GUIDE.read_text(), re.MULTILINE)
    *words, script = shlex.split(line)
    assert script == "docs/guides/examples/dcp_async.py"
    return [*words, REPOSITORY / script]


def test_the_dcp_example_is_killed_resumed_and_left_without_a_daemon(make_cluster, tmp_path):
    cluster = make_cluster(2)
    at_home = {"FASTCHECK_ADDRESS": cluster.address(NODE)}
    launchers: list[Launcher] = []

    def launch(name: str, **environment: str) -> Launcher:
        launchers.append(Launcher(tmp_path / f"{name}.log", *options(), **environment))
        return launchers[-1]

    try:
        # Turned off by one variable: what it computes then is what the others have to.
        whole_run = launch("whole", FASTCHECK_DISABLE="1")
        first = launch("first", **at_home)
        until(lambda: 14 in losses_in(first.lines), "the first run to be in its midst", 120)
        pids = begun(first.lines, 2)
        os.kill(max(pids), signal.SIGSTOP)  # the other one waits for it in its next collective
        until(lambda: newest_commit(cluster, "dcp") >= 10, "a commit from step 10 on")
        first.kill()
        whole_run.finish()
        whole = losses_in(whole_run.lines)
        assert set(begun(whole_run.lines, 2).values()) == {0} == set(pids.values())
        assert list(whole) == list(range(1, STEPS + 1))
        assert losses_in(first.lines).items() <= whole.items()

        second = launch("second", **at_home)
        pids = until(lambda: begun(second.lines, 2), "both ranks to have loaded", 120)
        (resumed_at,) = set(pids.values())
        assert resumed_at >= 10
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that there are steps left to do without a daemon
        cluster.kill(NODE)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        second.finish()
        assert losses_in(second.lines) == {step: loss for step, loss in whole.items() if step > resumed_at}
        assert any("a save failed" in line for line in second.lines)
    finally:
        for launcher in launchers:
            launcher.kill()
