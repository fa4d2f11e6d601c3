"""The wires of the lab do what they are told: what the scenarios conclude from them is worth no more than that."""

import subprocess
import sys
import time

import pytest
from tests.netlab.wires import Network, lives, run, unreachable

pytestmark = pytest.mark.usefixtures("network_namespaces")

PORT = 9999
ECHO = (
    "import socket\n"
    "server = socket.create_server(('0.0.0.0', 9999))\n"
    "print('ready', flush=True)\n"
    "while True:\n"
    "    link, _ = server.accept()\n"
    "    while data := link.recv(65536):\n"
    "        link.sendall(data)\n"
)
ROUND_TRIP = (
    "import socket, sys, time\n"
    "link = socket.create_connection((sys.argv[1], 9999), timeout=10)\n"
    "link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n"
    "size = int(sys.argv[2])\n"
    "start = time.monotonic()\n"
    "link.sendall(bytes(size))\n"
    "while size:\n"
    "    size -= len(link.recv(65536))\n"
    "print(time.monotonic() - start)\n"
)


@pytest.fixture
def network():
    with Network(["a", "b", "c"]) as network:
        yield network


def reached(network):
    """All directions that carry a connection's packets both ways."""
    return {
        (one, other)
        for one in network.names
        for other in set(network.names) - {one} - unreachable(network, one, set(network.names) - {one}, PORT)
    }


def test_a_link_a_direction_and_a_group_are_cut_and_healed(network):
    everything = {(a, b) for a in "abc" for b in "abc" if a != b}
    assert reached(network) == everything
    network.cut("a", "b")
    assert reached(network) == everything - {("a", "b"), ("b", "a")}
    network.heal()
    network.isolate("a", "b")
    assert reached(network) == {("a", "b"), ("b", "a")}
    network.heal()
    assert reached(network) == everything


def round_trip_s(network, size=1):
    return float(
        run(*network.command("a", sys.executable, "-c", ROUND_TRIP, network.address("b"), str(size)))
    )


def test_a_delay_and_a_rate_are_kept_to(network):
    server = subprocess.Popen(
        network.command("b", sys.executable, "-c", ECHO), stdout=subprocess.PIPE, text=True
    )
    assert server.stdout.readline() == "ready\n"
    network.delay("a", "b", 0.15)
    assert round_trip_s(network) >= 0.3
    assert round_trip_s(network, 1 << 20) >= 0.3, "whole segments arrive as well"
    network.heal()
    network.shape("a", 8)
    assert round_trip_s(network, 2 << 20) >= 1.0, "2 MiB at 1 MB/s, less what the bucket holds"
    server.kill()
    server.wait(10)


def test_a_rate_of_both_directions_holds_for_what_others_send_and_ends_with_healing(network):
    sink = (
        "import socket\n"
        "server = socket.create_server(('0.0.0.0', 9999))\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    link, _ = server.accept()\n"
        "    while link.recv(65536):\n"
        "        pass\n"
        "    link.sendall(b'1')\n"
        "    link.close()\n"
    )
    one_way = (
        "import socket, sys, time\n"
        "link = socket.create_connection((sys.argv[1], 9999), timeout=10)\n"
        "start = time.monotonic()\n"
        "link.sendall(bytes(2 << 20))\n"
        "link.shutdown(socket.SHUT_WR)\n"
        "link.recv(1)\n"
        "print(time.monotonic() - start)\n"
    )

    def one_way_s(sender, receiver):
        address = network.address(receiver)
        return float(run(*network.command(sender, sys.executable, "-c", one_way, address)))

    servers = [
        subprocess.Popen(network.command(name, sys.executable, "-c", sink), stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    assert all(server.stdout.readline() == "ready\n" for server in servers)
    network.shape_both("b", 8)
    assert one_way_s("a", "b") >= 1.0, "2 MiB at 1 MB/s, less what the bucket holds"
    assert one_way_s("b", "a") >= 1.0
    network.heal()
    assert one_way_s("a", "b") < 1.0
    for server in servers:
        server.kill()
        server.wait(10)


MAKER = """
import os, signal, subprocess, sys
from tests.netlab.wires import Network, run
network = Network(["a"])
network.__enter__()
sleep = network.command("a", "sleep", "600")
child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, start_new_session=True)
while str(child.pid) not in run("ip", "netns", "pids", network.namespace("a")).split():
    pass
print(network.namespace("a"), child.pid, flush=True)
if sys.argv[1:] == ["and keeper"]:
    network._keeper.kill()
    network._keeper.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def make_and_be_killed(*arguments):
    """A network's namespace, and the process in it, of a maker that is gone."""
    command = [sys.executable, "-c", MAKER, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    name, pid = done.stdout.split()
    return name, int(pid)


def test_a_network_is_gone_with_all_that_ran_in_it_when_its_maker_was_killed():
    name, pid = make_and_be_killed()
    deadline = time.monotonic() + 60
    while name in run("ip", "netns", "list"):
        assert time.monotonic() < deadline, "nobody removed it"
        time.sleep(0.05)
    assert not lives(pid)
