"""Copies yield to a trainer's own traffic on a shaped link, and are made all the same."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from tests.netlab.lab import Lab
from tests.netlab.wires import ROOT

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("network_namespaces")]

MBIT_PER_S = 200.0
PORT = 7999

#: Sends as fast as it goes until its input ends; the receiving end prints what came each quarter of a second.
SINK = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
sock, _ = listener.accept()
count, mark = 0, time.monotonic()
while data := sock.recv(1 << 20):
    count += len(data)
    now = time.monotonic()
    if now - mark >= 0.25:
        print(mark, now, count, flush=True)
        count, mark = 0, now
"""
SOURCE = """
import socket, sys, threading
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
enough = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), enough.set()), daemon=True).start()
while not enough.is_set():
    sock.sendall(bytes(1 << 18))
"""
SAVE = """
import sys, time, torch
from fastcheck import Checkpointer
with Checkpointer("gpt", rank=0, world_size=1) as ckpt:
    state = {"w": torch.randn(int(sys.argv[1]) * 262144)}
    began = time.monotonic()
    ckpt.save(1, state).result(timeout=100)
    print(began, time.monotonic())
"""


class Flow:
    """A TCP flow from one machine to another."""

    def __init__(self, lab: Lab, sender: str, receiver: str) -> None:
        where = [lab.network.address(receiver), str(PORT)]
        self._sink = subprocess.Popen(
            lab.network.command(receiver, sys.executable, "-c", SINK, *where),
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self._sink.stdout is not None and self._sink.stdout.readline() == "ready\n"
        self._source = subprocess.Popen(
            lab.network.command(sender, sys.executable, "-c", SOURCE, *where),
            stdin=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip

    def finish(self) -> list[tuple[float, float, int]]:
        """End it; (from, until, bytes) of each quarter of a second, on the machine's clock."""
        assert self._source.stdin is not None
        self._source.stdin.close()
        out, _ = self._sink.communicate(timeout=120)
        assert self._source.wait(10) == 0
        return [(float(a), float(b), int(n)) for a, b, n in (line.split() for line in out.splitlines())]


def rate(samples: list[tuple[float, float, int]], start: float, stop: float) -> float:
    """Bytes per second of the samples inside."""
    inside = [s for s in samples if start <= s[0] and s[1] <= stop]
    assert len(inside) >= 4
    return sum(n for _, _, n in inside) / (inside[-1][1] - inside[0][0])


def test_a_flow_of_the_trainer_keeps_nine_tenths_and_the_copy_is_made(make_lab) -> None:
    lab: Lab = make_lab(
        3, spread=1, codec="never", chunk_bytes=262144, pacing="adaptive", ram_budget_bytes="512MiB"
    )
    lab.network.shape("node-0", MBIT_PER_S)
    flow = Flow(lab, "node-0", "node-1")
    time.sleep(5)  # the flow alone: what it is compared with
    began, done = map(float, lab.train("node-0", SAVE, "32").split())
    samples = flow.finish()
    alone = rate(samples, began - 3.5, began)
    beside = rate(samples, began, min(done, samples[-1][1]))
    assert done - began < 60, "the copy has to be made in time"
    assert beside >= 0.9 * alone
