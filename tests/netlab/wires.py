"""A network of namespaces on this machine whose wires can be cut, one direction at a time, slowed down and delayed.

Each machine is a namespace with one interface, joined by a veth pair to a bridge in a namespace of its own. Nothing is
learned or asked for on this network: who has which hardware address is written down on every machine and on the bridge.
So a direction is cut by giving the sender a hardware address that nobody has. Its packets leave, and no one is told:
a lost packet, not a refusal, and connections that exist lose them like new ones. (`tc` filters and netem
are not in every kernel, and a blackhole route answers its own sender with an error.)

A delayed direction leads through `delaying.py` in the same way. Rates are shaped by tbf. All of it needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "fcnet"
DEAD_END = "02:fc:00:00:ff:ff"
DELAYER = "02:fc:00:00:ff:fe"
_COMMAND_S = 30.0
_numbers = itertools.count()

#: From linux/ethtool.h and linux/sockios.h.
_SIOCETHTOOL, _ETHTOOL_STXCSUM = 0x8946, 0x17


def run(*command: str) -> str:
    """A command's output.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_not() -> str:
    """Why no network can be made here; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        finally:
            run("ip", "netns", "del", name)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"network namespaces do not work here: {error}"
    return ""


def lives(pid: int) -> bool:
    """Whether a process has this id; one that is dead and that nobody has asked about is not a process any more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove_leftovers() -> list[str]:
    """Remove the networks, and the processes in them, of test runs that were killed; their names."""
    removed = []
    with (Path(tempfile.gettempdir()) / f"{PREFIX}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the killed run's keeper does the same
        for line in run("ip", "netns", "list").splitlines():
            name = line.split()[0]
            made = re.fullmatch(rf"{PREFIX}-(\d+)-.+", name)
            if made and not lives(int(made[1])):
                _remove_namespace(name)
                removed.append(name)
    return removed


def _remove_namespace(name: str) -> None:
    """End what runs in it, and delete it. Repeatable."""
    if name not in {line.split()[0] for line in run("ip", "netns", "list").splitlines()}:
        return
    deadline = time.monotonic() + _COMMAND_S
    while pids := run("ip", "netns", "pids", name).split():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {' '.join(pids)} in {name} survive SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(pid), os.WNOHANG)
        time.sleep(0.02)
    run("ip", "netns", "del", name)


class Network:
    """Machines that reach each other, until told otherwise. A context manager: it is gone afterwards, also when this
    process is killed (`keeper.py`).

    Args:
        names: of the machines; the i-th gets the address 10.77.0.(i + 1).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._key = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.names = list(names)
        self._switch = f"{self._key}-switch"
        self._delayer: subprocess.Popen[str] | None = None
        self._shaped: set[str] = set()
        #: Machines whose port at the bridge is shaped, too.
        self._shaped_in: set[str] = set()
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        remove_leftovers()
        self._keeper = _start_keeper()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def address(self, name: str) -> str:
        """The machine's address."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        """For `ip netns exec`."""
        return f"{self._key}-{name}"

    def command(self, name: str, *command: str) -> list[str]:
        """The command that runs `command` on a machine; it becomes that command's process."""
        return ["ip", "netns", "exec", self.namespace(name), *command]

    # What can be done to the wires.

    def cut_way(self, sender: str, receiver: str) -> None:
        """What `sender` sends to `receiver` is lost; the other direction stays as it is."""
        self._point(sender, receiver, DEAD_END)

    def cut(self, one: str, other: str) -> None:
        """The link between two machines is cut."""
        self.cut_way(one, other)
        self.cut_way(other, one)

    def isolate(self, *group: str) -> None:
        """The group is cut off from all others; inside it, and among the others, all goes on."""
        for inside in group:
            for outside in self.names:
                if outside not in group:
                    self.cut(inside, outside)

    def delay_way(self, sender: str, receiver: str, delay_s: float) -> None:
        """What `sender` sends to `receiver` arrives that much later, in order."""
        self._delaying(f"{self.address(sender)} {self.address(receiver)} {delay_s}")
        self._checksums_in_software(sender)
        self._point(sender, receiver, DELAYER)

    def delay(self, one: str, other: str, delay_s: float) -> None:
        """Both directions are delayed: a round trip takes twice `delay_s` longer."""
        self.delay_way(one, other, delay_s)
        self.delay_way(other, one, delay_s)

    def shape(self, name: str, mbit_per_s: float) -> None:
        """What the machine sends goes at that rate at most."""
        run(*self.command(name, "tc", *_tbf("eth0", mbit_per_s)))
        self._shaped.add(name)

    def shape_both(self, name: str, mbit_per_s: float) -> None:
        """What the machine sends, and what is sent to it by all others together, goes at that rate at most."""
        self.shape(name, mbit_per_s)
        self._on_switch(" ".join(["tc", *_tbf(self._port(name), mbit_per_s)]))
        self._shaped_in.add(name)

    def heal(self) -> None:
        """Every wire is whole, fast and prompt again."""
        for sender, receiver in itertools.permutations(self.names, 2):
            self._point(sender, receiver, self._hardware(receiver))
        for name in self._shaped:
            run(*self.command(name, "tc", "qdisc", "del", "dev", "eth0", "root"))
        self._shaped.clear()
        self._on_switch(*(f"tc qdisc del dev {self._port(name)} root" for name in self._shaped_in))
        self._shaped_in.clear()

    def close(self) -> None:
        """End all that runs in the namespaces, and remove them. Repeatable."""
        for namespace in [*map(self.namespace, self.names), self._switch]:
            _remove_namespace(namespace)
        if self._delayer is not None:
            self._delayer.wait(_COMMAND_S)
            self._delayer = None
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait(_COMMAND_S)
            self._keeper = None

    # Parts.

    def _hardware(self, name: str) -> str:
        return f"02:fc:00:00:00:{self.names.index(name) + 1:02x}"

    def _port(self, name: str) -> str:
        return f"port{self.names.index(name)}"

    def _build(self) -> None:
        run("ip", "netns", "add", self._switch)
        self._on_switch("ip link add br0 type bridge", "ip link set br0 up")
        for name in self.names:
            space = self.namespace(name)
            run("ip", "netns", "add", space)
            peer = ["type", "veth", "peer", "name", self._port(name), "netns", self._switch]
            run("ip", "link", "add", "name", "eth0", "address", self._hardware(name), "netns", space, *peer)
            run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", space, "link", "set", device, "up")
            self._plug(self._port(name), self._hardware(name))
        self.heal()

    def _plug(self, port: str, hardware: str) -> None:
        self._on_switch(
            f"ip link set {port} master br0 up",
            f"bridge link set dev {port} learning off flood off",
            f"bridge fdb replace {hardware} dev {port} master static",
        )

    def _on_switch(self, *commands: str) -> None:
        for command in commands:
            run("ip", "netns", "exec", self._switch, *command.split())

    def _point(self, sender: str, receiver: str, hardware: str) -> None:
        neighbour = [self.address(receiver), "lladdr", hardware, "dev", "eth0", "nud", "permanent"]
        run("ip", "-n", self.namespace(sender), "neigh", "replace", *neighbour)

    def _delaying(self, rule: str) -> None:
        """Tell the delayer a rule, once it runs; returns when it keeps to it."""
        if self._delayer is None:
            self._on_switch(
                f"ip link add name slow0 address {DELAYER} type veth peer name portslow",
                "ip link set slow0 up",
            )
            self._plug("portslow", DELAYER)
            hardware = [f"{self.address(name)}={self._hardware(name)}" for name in self.names]
            inside = [sys.executable, "-m", "tests.netlab.delaying", "slow0", *hardware]
            self._delayer = subprocess.Popen(
                ["ip", "netns", "exec", self._switch, *inside],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert self._delayer.stdin is not None and self._delayer.stdout is not None
        self._delayer.stdin.write(rule + "\n")
        self._delayer.stdin.flush()
        if self._delayer.stdout.readline() != rule + "\n":
            raise RuntimeError(f"the delayer did not take the rule {rule!r}")

    def _checksums_in_software(self, name: str) -> None:
        """A veth leaves checksums and cutting into packets to a card that is not there; a raw socket would see that."""
        program = (
            "import array, fcntl, socket, struct\n"
            f"value = array.array('B', struct.pack('II', {_ETHTOOL_STXCSUM}, 0))\n"
            "request = struct.pack('16sP', b'eth0', value.buffer_info()[0])\n"
            f"fcntl.ioctl(socket.socket(), {_SIOCETHTOOL}, request)\n"
        )
        run(*self.command(name, sys.executable, "-c", program))


def _start_keeper() -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-m", "tests.netlab.keeper", str(os.getpid())],
        cwd=ROOT, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)},
    )  # fmt: skip


def _tbf(device: str, mbit_per_s: float) -> list[str]:
    """Arguments of tc. The bucket holds a millisecond: fast links would wait for the timer that fills it."""
    burst_kb = max(256, round(mbit_per_s / 8))
    rate = ["rate", f"{mbit_per_s:g}mbit", "burst", f"{burst_kb}kb", "latency", "100ms"]
    return ["qdisc", "replace", "dev", device, "root", "tbf", *rate]


def unreachable(network: Network, sender: str, receivers: Iterable[str], port: int) -> set[str]:
    """Receivers to which a connection from `sender` does not come about within a second."""
    program = (
        "import socket, sys\n"
        "for host in sys.argv[2:]:\n"
        "    try:\n"
        "        socket.create_connection((host, int(sys.argv[1])), timeout=1).close()\n"
        "    except ConnectionRefusedError:\n"  # its answer came back
        "        pass\n"
        "    except OSError:\n"
        "        print(host)\n"
    )
    addresses = {network.address(name): name for name in receivers}
    out = run(*network.command(sender, sys.executable, "-c", program, str(port), *addresses))
    return {addresses[line] for line in out.split()}
