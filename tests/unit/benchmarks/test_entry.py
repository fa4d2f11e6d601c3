"""Every benchmark ends in order when it is told to, leaves no process when it is killed, and writes what it found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.benchmarks.entry import TERMINATED, write_results

TOLD = """
import sys
from tests.benchmarks.entry import end_in_order_when_told
end_in_order_when_told()
try:
    print("ready", flush=True)
    sys.stdin.read()
finally:
    print("cleaned up", flush=True)
"""
WITH_A_RECEIVER = """
import sys
from tests.benchmarks.limits import FramedTcp
print(FramedTcp(1 << 20, 1)._receiver.pid, flush=True)
sys.stdin.read()
"""


def start(program):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_sigterm_unwinds():
    with start(TOLD) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait(10) == TERMINATED


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_receiving_end_of_the_tcp_limit_ends_with_the_benchmark(ending):
    with start(WITH_A_RECEIVER) as process:
        receiver = psutil.Process(int(process.stdout.readline()))
        process.send_signal(ending)
        process.wait(10)
        deadline = time.monotonic() + 60
        while receiver.is_running() and receiver.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.02)


def test_what_is_written_says_on_what_it_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "3", "--out", str(tmp_path / "made")])
    path = write_results(tmp_path / "made", {"figures": [{"runs": [1.0, 2.0]}]}, "-some")
    assert path.name.endswith("-some.json")
    written = json.loads(path.read_text())
    assert written["figures"] == [{"runs": [1.0, 2.0]}]
    assert written["arguments"] == ["--rounds", "3", "--out", "made"]
    assert {"cpu", "cores", "kernel", "versions", "commit"} <= set(written["machine"])
