"""The same training steps over links of several rates, sent raw, by the policy's choice, and always encoded.

A cluster of each kind lives in one network namespace whose loopback is shaped (tbf), so that whatever leaves a
daemon goes at the link's rate. The kinds take turns step by step, so that a noisy moment hits all of them.
Making namespaces needs root. `python -m tests.benchmarks.links ROUNDS` is the part inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastcheck import Checkpointer
from fastcheck.local import LocalCluster

from .report import Figure

#: Gbit/s; None: the loopback as it is, faster than any network.
RATES: tuple[float | None, ...] = (1.0, 2.5, 10.0, None)
KINDS = ("never", "auto", "always")
#: First steps find cold memory, no base, and a policy that knows nothing of the link yet.
WARM_UP = 5
TIMEOUT_S = 1800


def links(rounds: int) -> list[Figure]:
    """Seconds from seal to last acknowledgement for each rate and kind, against raw in the same rounds."""
    figures = []
    for rate in RATES:
        with _namespace(rate) as name:
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "tests.benchmarks.links",
                str(rounds),
            ]
            print(f"link of {_name(rate)}", file=sys.stderr, flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S)
        runs = json.loads(done.stdout)
        raw = runs["never"]["replicate_s"]
        figures.append(Figure(f"replicate over {_name(rate)}, raw", "s", raw))
        for kind in KINDS[1:]:
            goal = "ratio <= 1.05" if kind == "auto" else ""
            title = f"replicate over {_name(rate)}, codec: {kind}"
            figures.append(Figure(title, "s", runs[kind]["replicate_s"], raw, "raw", goal))
            figures.append(
                Figure(f"  bytes of the state per byte sent, codec: {kind}", "x", runs[kind]["ratio"])
            )
    return figures


def _name(rate: float | None) -> str:
    return "loopback, not shaped" if rate is None else f"{rate:g} Gbit/s"


@contextlib.contextmanager
def _namespace(rate: float | None) -> Iterator[str]:
    name = f"fastcheck-bench-{os.getpid()}"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, timeout=30)

    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "set", "lo", "up", "mtu", "9000")
        if rate is not None:
            shape = ["tbf", "rate", f"{rate * 1000:g}mbit", "burst", "1mb", "latency", "50ms"]
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", *shape)
        yield name
    finally:
        run("ip", "netns", "del", name)


class Training:
    """20M parameters in AdamW whose gradients are drawn, since what they are does not matter to the link."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(20)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)

    def step(self) -> None:
        """One step of the optimizer."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        """As a trainer saves it."""
        return {"model": self.model, "optimizer": self.optimizer}


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Every run of every kind, inside the namespace."""
    training = Training()
    runs: dict[str, dict[str, list[float]]] = {k: {"replicate_s": [], "ratio": []} for k in KINDS}
    with contextlib.ExitStack() as stack:
        trainers = {}
        for kind in KINDS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastcheck-bench-")))
            cluster = stack.enter_context(LocalCluster(folder))
            cluster.up(2, tolerate=1, ram_budget="3GiB", settings={"codec": kind, "spread": 1})
            trainers[kind] = stack.enter_context(
                Checkpointer("links", rank=0, world_size=1, address=cluster.address("node-0"))
            )
        for step in range(1, WARM_UP + rounds + 1):
            training.step()
            for kind, checkpointer in trainers.items():
                handle = checkpointer.save(step, training.state)
                handle.result(timeout=300)
                ratio = handle.stats["bytes"] / handle.stats["encoded_bytes"]
                said = f"  {step} {kind}: {handle.stats['replicate_s']:.3f} s, {ratio:.2f}x"
                print(said, file=sys.stderr, flush=True)
                if step > WARM_UP:
                    runs[kind]["replicate_s"].append(handle.stats["replicate_s"])
                    runs[kind]["ratio"].append(ratio)
    return runs


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
