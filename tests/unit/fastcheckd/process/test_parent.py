"""The parent, as a process of its own with real forks; what the forked processes do is a few lines of each test.

Each line that one of them prints begins with its name.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 60.0
PREAMBLE = """
import asyncio, os, signal, sys
from fastcheck_proto.v1 import node_pb2 as pb
from fastcheckd import main
from fastcheckd.config import Config
from fastcheckd.errors import ConfigError
from fastcheckd.process import agent, data, parent, registry, restarts, runtime
from fastcheckd.process.systemd import Notifier

def say(name, *what):
    os.write(1, " ".join(map(str, (name, *what, os.getpid()))).encode() + b"\\n")

async def until_stopped(name):
    stopping = runtime.stop_signal()
    say(name, "runs")
    await stopping
    say(name, "stops")

async def data_run(config):
    await until_stopped("data")

async def agent_run(config, supervisor, notifier, liveness):
    await until_stopped("agent")

async def registry_run(config, liveness):
    await until_stopped("registry")

VOTERS = [pb.VoterRecord(node_id="n0", registry_address="127.0.0.1:1", raft_address="127.0.0.1:2")]
restarts.BACKOFF_MIN_S = 0.02
import fastcheckd.process.child as child
config = dict(node_id="n0", shutdown_grace_s=0.3)
"""
END = """
data.run, agent.run, registry.run = data_run, agent_run, registry_run
role = parent.Parent(Config(**config), Notifier()).run()
sys.exit(role if isinstance(role, int) else main._run_role(role))
"""


class Node:
    """A parent and its processes."""

    def __init__(self, code, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code) + END],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        )
        self._lines = queue.Queue()
        self.log = ""
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_log)]
        for reader in self._readers:
            reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.split())

    def _read_log(self):
        for line in self.process.stderr:
            self.log += line

    def said(self):
        """The next line: name, what, and the process that said it."""
        try:
            name, *what, pid = self._lines.get(timeout=DEADLINE_S)
        except queue.Empty:
            pytest.fail(f"nothing was said; the log:\n{self.log}")
        return name, " ".join(what), psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else int(pid)

    def hear(self, *wanted):
        """Wait until each of these "name what" was said; the processes that said them."""
        found = {}
        while len(found) < len(wanted):
            name, what, process = self.said()
            if f"{name} {what}" in wanted:
                found[f"{name} {what}"] = process
        return [found[line] for line in wanted]

    def logged(self, text):
        end = time.monotonic() + DEADLINE_S
        while text not in self.log:
            assert time.monotonic() < end, self.log
            time.sleep(0.01)

    def end(self):
        self.process.terminate()
        code = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return code


@pytest.fixture
def start():
    nodes = []

    def begin(code="", **environment):
        nodes.append(Node(code, environment))
        return nodes[-1]

    yield begin
    for node in nodes:
        children = node.process.poll() is None and psutil.Process(node.process.pid).children()
        for process in [node.process, *(children or [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.end()


def test_each_is_started_again_alone_and_they_end_in_their_order(start):
    node = start()
    data, agent = node.hear("data runs", "agent runs")
    assert {data.name(), agent.name()} == {"fcheck-data", "fcheck-agent"}
    data.kill()
    (new_data,) = node.hear("data runs")
    agent.kill()
    (new_agent,) = node.hear("agent runs")
    assert len({data.pid, new_data.pid, agent.pid, new_agent.pid}) == 4 and new_data.is_running()
    assert node.end() == 0
    ends = [node.said()[:2] for _ in range(2)]
    assert ends == [("agent", "stops"), ("data", "stops")]
    assert "restarting in" in node.log and "Traceback" not in node.log


def test_ctrl_c_reaches_all_and_is_for_the_parent_to_act_on(start):
    node = start()
    processes = node.hear("data runs", "agent runs")
    for process in processes:
        process.send_signal(signal.SIGINT)
    node.process.send_signal(signal.SIGINT)
    assert [node.said()[:2] for _ in range(2)] == [("agent", "stops"), ("data", "stops")]
    assert node.process.wait(DEADLINE_S) == 0


def test_one_that_ignores_sigterm_is_killed(start):
    node = start("""
        async def data_run(config):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("data", "runs")
            await asyncio.sleep(600)
    """)
    (data, _) = node.hear("data runs", "agent runs")
    assert node.end() == 0
    assert not data.is_running() and "the data process did not stop in time" in node.log


def test_a_second_sigterm_reaches_the_agent_and_not_the_first_twice(start):
    node = start("""
        async def agent_run(config, supervisor, notifier, liveness):
            first = runtime.stop_signal()
            say("agent", "runs")
            await first
            second = runtime.stop_signal()
            say("agent", "drains")
            await second
            say("agent", "stops")
    """)
    node.hear("data runs", "agent runs")
    node.process.terminate()
    node.hear("agent drains")
    node.process.terminate()
    node.hear("agent stops", "data stops")
    assert node.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("name", ["data", "agent"])
def test_one_that_cannot_work_as_configured_ends_the_daemon(start, name):
    arguments = {"data": "config", "agent": "config, supervisor, notifier, liveness"}[name]
    node = start(f"""
        async def {name}_run({arguments}):
            raise ConfigError("the port is in use; change it")
    """)
    assert node.process.wait(DEADLINE_S) == 78
    node.logged("the port is in use")
    node.logged(f"the {name} process cannot start")


def test_all_end_with_the_parent(start):
    node = start()
    processes = node.hear("data runs", "agent runs")
    node.process.kill()
    for process in processes:
        assert process.wait(DEADLINE_S) is None or not process.is_running()


def test_one_that_keeps_ending_is_told_to_the_agent(start):
    node = start("""
        async def data_run(config):
            raise SystemExit(5)

        async def agent_run(config, supervisor, notifier, liveness):
            telling = asyncio.create_task(supervisor.run())
            while not supervisor.processes.data.trouble:
                await asyncio.sleep(0.01)
            say("agent", supervisor.processes.data.trouble.replace(" ", "_"), supervisor.processes.data.restarts)
            await until_stopped("agent")
    """)
    _, what, _ = node.said()
    assert what == "keeps_ending_(3_times_in_a_row,_lastly_with_5) 3"


VOTING = """
    config["data_hung_after_s"] = 0.5
    parent.LIVENESS_INTERVAL_S = child.LIVENESS_INTERVAL_S = 0.05

    async def agent_run(config, supervisor, notifier, liveness):
        telling = asyncio.create_task(supervisor.run())
        supervisor.run_registry(VOTERS, lambda error: say("agent", "refused"))
        while not (supervisor.registry and supervisor.registry.pid):
            await asyncio.sleep(0.01)
        stopping = runtime.stop_signal()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: asyncio.create_task(stop(supervisor)))
        say("agent", "knows")
        await stopping
        say("agent", "stops")

    async def stop(supervisor):
        await supervisor.stop_registry()
        say("agent", "knows the end")
        supervisor.run_registry(VOTERS, lambda error: say("agent", "refused"))

    async def registry_run(config, liveness):
        stopping = runtime.stop_signal()
        beats = 0
        while not stopping.done():
            liveness.write()
            beats += 1
            if beats == 10:  # the parent has seen it by now
                say("registry", "runs")
            await asyncio.sleep(0.02)
        say("registry", "stops")
"""


def test_a_registry_process_runs_while_the_agent_asks_for_one_and_outlives_the_agent(start):
    node = start(VOTING)
    (registry, agent) = node.hear("registry runs", "agent knows")
    agent.kill()
    (agent,) = node.hear("agent knows")
    assert registry.is_running() and registry.name() == "fcheck-registry"
    agent.send_signal(signal.SIGUSR1)
    node.hear("registry stops", "agent knows the end")
    (again,) = node.hear("registry runs")
    assert again.pid != registry.pid
    assert node.end() == 0
    ends = []
    while len(ends) < 3:
        ends += [name for name, what, _ in [node.said()] if what == "stops"]
    assert ends == ["agent", "data", "registry"]


@pytest.mark.alone
def test_a_registry_process_that_makes_no_progress_is_ended_and_started_anew(start):
    node = start(VOTING)
    (registry, _) = node.hear("registry runs", "agent knows")
    registry.suspend()
    (again,) = node.hear("registry runs")
    assert again.pid != registry.pid
    node.logged("has made no progress for 1.5 s")
    assert node.log.count("has made no progress") == 1


@pytest.mark.alone
def test_an_agent_that_makes_no_progress_is_ended_and_started_anew(start):
    node = start("""
        config["data_hung_after_s"] = 0.5
        parent.LIVENESS_INTERVAL_S = child.LIVENESS_INTERVAL_S = 0.05

        async def agent_run(config, supervisor, notifier, liveness):
            beats = 0
            while True:
                liveness.write()
                beats += 1
                if beats == 10:  # the parent has seen it by now
                    say("agent", "runs")
                await asyncio.sleep(0.02)
    """)
    (data, agent) = node.hear("data runs", "agent runs")
    agent.suspend()
    (again,) = node.hear("agent runs")
    assert again.pid != agent.pid and data.is_running()


def test_a_new_agent_that_wants_no_registry_process_gets_none(start, tmp_path):
    node = start(
        VOTING
        + f"""
    voting_agent = agent_run

    async def agent_run(config, supervisor, notifier, liveness):
        try:
            os.mkdir({str(tmp_path / "first")!r})
        except FileExistsError:
            supervisor.drop_registry()
            await until_stopped("agent")
        else:
            await voting_agent(config, supervisor, notifier, liveness)
    """
    )
    (_, agent) = node.hear("registry runs", "agent knows")
    agent.kill()
    node.hear("registry stops", "agent runs")


def test_a_registry_process_that_cannot_work_is_refused_to_the_agent_and_the_others_go_on(start):
    node = start("""
        async def registry_run(config, liveness):
            raise ConfigError("the voters differ")

        async def agent_run(config, supervisor, notifier, liveness):
            telling = asyncio.create_task(supervisor.run())
            refused = asyncio.Event()
            supervisor.run_registry(VOTERS, lambda error: refused.set())
            await refused.wait()
            assert supervisor.registry is None
            await until_stopped("agent")
    """)
    (data, _) = node.hear("data runs", "agent runs")
    assert data.is_running() and node.process.poll() is None
    node.logged("the voters differ")


def test_an_agent_that_talks_nonsense_is_ended(start):
    node = start("""
        async def agent_run(config, supervisor, notifier, liveness):
            nonsense = lambda: supervisor._line.send(b"\\xff" * 10)
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, nonsense)
            say("agent", "runs")
            await asyncio.sleep(600)
    """)
    (data, agent) = node.hear("data runs", "agent runs")
    agent.send_signal(signal.SIGUSR1)
    (again,) = node.hear("agent runs")
    assert again.pid != agent.pid and data.is_running()


def test_the_data_process_is_killed_for_the_agent_unless_it_is_another_one_by_now(start):
    node = start("""
        async def agent_run(config, supervisor, notifier, liveness):
            telling = asyncio.create_task(supervisor.run())
            while supervisor.data_pid is None:
                await asyncio.sleep(0.01)
            supervisor.kill_data(os.getpid())
            await until_stopped("agent")
            supervisor.kill_data(supervisor.data_pid)
            first = supervisor.data_pid
            while supervisor.data_pid in (None, first):
                await asyncio.sleep(0.01)
            say("agent", "knows")
    """)
    (data, agent) = node.hear("data runs", "agent runs")
    assert data.is_running()
    agent.terminate()
    node.hear("data runs", "agent knows")


def test_systemd_hears_the_agent_through_the_parent_and_no_sign_of_life_without_a_vote(start, tmp_path):
    import socket  # noqa: PLC0415  this test alone listens

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(DEADLINE_S)
    node = start(
        """
        config["data_hung_after_s"] = 0.2
        parent.LIVENESS_INTERVAL_S = child.LIVENESS_INTERVAL_S = 0.05

        async def agent_run(config, supervisor, notifier, liveness):
            telling = asyncio.create_task(supervisor.run())
            supervisor.run_registry(VOTERS, lambda error: None)
            assert "NOTIFY_SOCKET" not in os.environ and notifier.watchdog_s == 9
            say("agent", "runs")
            while True:
                notifier.tell(STATUS="well", WATCHDOG="1")
                await asyncio.sleep(0.02)

        async def registry_run(config, liveness):
            await until_stopped("registry")
        """,
        NOTIFY_SOCKET=str(tmp_path / "notify"),
        WATCHDOG_USEC="9000000",
        WATCHDOG_PID="",
    )
    node.hear("agent runs")
    assert set(listener.recv(4096).decode().split("\n")) == {"STATUS=well", "WATCHDOG=1"}
    # The registry process gives no sign of life, and has never given one: it is not ended, and it is told.
    while listener.recv(4096) != b"STATUS=well":
        pass
    node.logged("no progress of registry")
    listener.close()


def test_it_has_one_thread_and_hands_down_no_descriptor_of_its_own(start):
    node = start(VOTING)
    (_, agent) = node.hear("registry runs", "agent knows")
    parent = psutil.Process(node.process.pid)
    assert parent.num_threads() == 1
    kinds = {
        process.name(): sorted(
            str(fd.readlink()).split(":")[0] for fd in Path(f"/proc/{process.pid}/fd").iterdir()
        )
        for process in parent.children()
    }
    # stdin, stdout, stderr; asyncio's epoll and its own socket pair; and the line to the parent.
    assert kinds["fcheck-agent"].count("socket") == 3, kinds
    assert kinds["fcheck-data"].count("socket") == 2 and kinds["fcheck-data"].count("pipe") <= 3, kinds
    assert kinds["fcheck-registry"].count("socket") == 2, kinds
    agent.terminate()
