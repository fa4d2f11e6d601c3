"""The unit that is shipped, under a real systemd: it starts, is watched, is killed, and what it held is there again."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.deploy.machine import PACKAGES, PYTHON, ROOT, SOURCE, Machine, why_not

UNITS = ROOT / "deploy/systemd"
#: Below this `systemd-analyze security` calls a service ok; in tenths.
EXPOSURE_MAX = 50
DEADLINE_S = 60.0

NODE = """
node_id: {node}
ram_dir: {ram_dir}
runtime_dir: /run/{folder}
state_dir: /var/lib/{folder}
ram_budget_bytes: 64MiB
agent_port: {port}
data_port: {data_port}
lane_port: {lane_port}
metrics_address: "127.0.0.1:{metrics_port}"
voters:
  - {{node_id: here, registry_address: "127.0.0.1:7453", raft_address: "127.0.0.1:7454"}}
drain_on_stop_s: 2
"""
ENVIRONMENT = (
    f"PYTHONPATH={SOURCE}/daemon:{SOURCE}/client:{SOURCE}/proto:{PACKAGES} LD_LIBRARY_PATH={PYTHON}/lib "
    "PYTHONDONTWRITEBYTECODE=1"
)
#: What a machine sets for itself: where its Python is, and here how long to wait for a sign of life.
DROP_IN = f"[Service]\nEnvironment={ENVIRONMENT}\nWatchdogSec=3s\n"
TRAINER = """
import sys, torch
from fastcheck import Checkpointer
with Checkpointer("gpt", rank=0, world_size=1, address="unix:///run/fastcheck/fastcheckd.sock") as ckpt:
    state = {"w": torch.arange(100_000)}
    if sys.argv[1] == "save":
        assert ckpt.save(1, state).result(timeout=60).committed
    else:
        state["w"].zero_()
        assert ckpt.load(state) == 1 and torch.equal(state["w"], torch.arange(100_000))
"""


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)  # between two looks


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """With the unit installed and started, and a second node beside it to hold copies."""
    if reason := why_not():
        pytest.skip(reason)
    with Machine(tmp_path_factory.mktemp("machine")) as made:
        made.run("systemd-sysusers")
        here = NODE.format(
            node="here",
            ram_dir="/mnt/fastcheck",
            folder="fastcheck",
            port=7450,
            data_port=7451,
            lane_port=7452,
            metrics_port=7455,
        )
        there = NODE.format(
            node="there",
            ram_dir="/run/there/ram",
            folder="there",
            port=7460,
            data_port=7461,
            lane_port=7462,
            metrics_port=7465,
        )
        made.write("/etc/fastcheck/node.yaml", here)
        made.write("/etc/there.yaml", there)
        made.write("/etc/systemd/system/fastcheckd.service.d/test.conf", DROP_IN)
        made.write("/opt/trainer.py", TRAINER)
        made.run("systemctl", "daemon-reload")
        made.run("systemctl", "enable", "--now", "mnt-fastcheck.mount")
        made.run("systemctl", "enable", "--now", "fastcheckd")
        made.run(
            "systemd-run", "--unit=there", "--uid=fastcheck", "--property=RuntimeDirectory=there",
            "--property=StateDirectory=there", *(f"--setenv={each}" for each in ENVIRONMENT.split()),
            "/opt/fastcheck/bin/fastcheckd", "run", "--config", "/etc/there.yaml",
        )  # fmt: skip
        yield made


def train(machine: Machine, what: str) -> None:
    done = machine.run(
        "systemd-run", "--pipe", "--wait", "--quiet", "--collect", "--uid=fastcheck",
        *(f"--setenv={each}" for each in ENVIRONMENT.split()),
        f"{PYTHON}/bin/python3", "/opt/trainer.py", what,
        check=False, timeout_s=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + journal(machine)


def journal(machine: Machine) -> str:
    return machine.run("journalctl", "--unit=fastcheckd", "--no-pager", "--output=cat").stdout


def active(machine: Machine) -> bool:
    return machine.show("fastcheckd", "ActiveState") == "active"


def restarts(machine: Machine) -> int:
    return int(machine.show("fastcheckd", "NRestarts"))


def test_the_daemon_is_ready_saves_under_its_sandbox_and_adopts_its_memory_after_a_kill(
    machine: Machine,
) -> None:
    assert active(machine)  # Type=notify: `start` returned when it was ready
    until(lambda: "incarnation" in machine.show("fastcheckd", "StatusText"), "a status line")
    assert "data process ok, votes" in machine.show("fastcheckd", "StatusText")
    train(machine, "save")

    machine.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "fastcheckd")
    until(lambda: restarts(machine) == 1 and active(machine), "a new start")
    said = journal(machine)
    assert " 0 shards adopted" not in said.rpartition("Main process exited")[2], said
    train(machine, "load")


def test_an_agent_that_makes_no_progress_is_ended_by_the_watchdog(machine: Machine) -> None:
    before = restarts(machine)
    assert machine.show("fastcheckd", "WatchdogUSec") == "3s"
    machine.run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", "fastcheckd")
    until(lambda: restarts(machine) == before + 1 and active(machine), "a new start")
    assert "Watchdog timeout" in journal(machine)
    train(machine, "load")


def test_a_stop_drains_as_long_as_it_may_and_ends_in_order(machine: Machine) -> None:
    machine.run("systemctl", "stop", "fastcheckd")
    assert machine.show("fastcheckd", "Result") == "success"
    # Two nodes, two copies: there is nowhere to make another.
    assert "stopping undrained after 2 s" in journal(machine)
    machine.run("systemctl", "start", "fastcheckd")
    train(machine, "load")


@pytest.mark.parametrize("unit", ["fastcheckd.service", "mnt-fastcheck.mount"])
def test_the_units_have_no_mistakes(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    # Where the commands are that it starts is checked too.
    for name in ("fastcheckd", "fastcheck"):
        place = tmp_path / "bin" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
    text = (UNITS / unit).read_text().replace("/opt/fastcheck/bin", str(tmp_path / "bin"))
    (tmp_path / unit).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # A key that it does not know is only printed.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_sandbox_is_tight() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    done = subprocess.run(
        [
            "systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}",
            str(UNITS / "fastcheckd.service"),
        ],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:]
