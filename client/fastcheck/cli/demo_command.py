"""`fastcheck demo`."""

from __future__ import annotations

import importlib.util
import signal
import sys
from types import FrameType

import click

from ..demo import view
from ..demo.display import Display
from ..demo.scenario import LEADER, Demo
from ..demo.settings import NODES, TrainSettings
from ..errors import FastCheckError
from .options import output_option
from .output import Exit, dump, stderr_console, stdout_console


@click.command()
@click.option(
    "--steps", type=click.IntRange(4, 1000), default=TrainSettings.steps, show_default=True, help="Steps."
)
@click.option("--kill-at", type=click.IntRange(min=2), help="Kill after this step. Default: in the middle.")
@click.option(
    "--victim",
    type=click.Choice([LEADER, *(f"node-{index}" for index in range(NODES))]),
    default=LEADER,
    show_default=True,
    help="Which node dies; the leader is the one that leads the registry then.",
)
@click.option("--seed", type=int, default=TrainSettings.seed, show_default=True, help="Of the training.")
@output_option
@click.pass_context
def demo(ctx: click.Context, *, steps: int, kill_at: int | None, victim: str, seed: int, output: str) -> None:
    """Train on 4 nodes, lose one, and go on bit for bit.

    From the other nodes' RAM, without a file. Takes a minute or two.

    Exits 1 when anything differs from an uninterrupted run.
    """
    for package, extra in (("torch", "torch"), ("fastcheckd", "'fastcheck[daemon,cli]'")):
        if importlib.util.find_spec(package) is None:
            raise FastCheckError(
                f"the demo needs {package}, which is not installed; run: pip install {extra}"
            )
    # So that `kill` takes the cluster down just as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    console = stdout_console() if output == "table" else stderr_console()
    settings = TrainSettings(steps=steps, seed=seed)
    with Display(console) as display:
        result = Demo(settings, display, kill_at=kill_at or steps // 2, victim=victim).run()
    console.print(view.summary(result))
    if output != "table":
        sys.stdout.write(dump(result, output, one_line=True))
    ctx.exit(Exit.OK if result["bit_identical"] and result["losses_identical"] else Exit.ERROR)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
