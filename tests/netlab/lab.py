"""Real daemons, each on a machine of its own: a network namespace, with addresses that the others reach over wires.

A `Lab` answers what a `LocalCluster` answers, so jobs and questions of the cluster tests' harness work on it as well:
trainers and operators reach a node through its Unix socket, which works from every namespace. `train` runs a trainer on
the machine itself. Daemons have the same ports everywhere, as in earnest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.forks import Fork, run
from tests.netlab.wires import Network, lives, remove_leftovers

from fastcheck.admin import AdminClient
from fastcheck.errors import FastCheckError
from fastcheck.local.processes import ProcessRef, kill_all, node_processes, tail

REGISTRY_PORT, RAFT_PORT = 7453, 7454
UP_TIMEOUT_S = 60.0
#: Not imported here: it sets what gRPC reads when it is loaded.
_DAEMON = "tests.netlab.fastcheckd_forks"
_ENTER = "import sys\nfrom tests.netlab.namespaces import enter\nenter(sys.argv.pop(1))"
_SHM = Path("/dev/shm")


class Lab:
    """A cluster on a network of its own. A context manager: processes, namespaces and memory are gone afterwards.

    Args:
        folder: for logs and configs; they stay.
        nodes: how many; the first three are the voters, of two the first.
        network: one that exists, has these nodes among its machines and outlives this cluster; by default the cluster
            makes its own.
        voter_ports: of the registry's two listeners; others for a second cluster on the same machines.
        settings: further config keys of every node; a function is given the node's id.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        network: Network | None = None,
        voter_ports: tuple[int, int] = (REGISTRY_PORT, RAFT_PORT),
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.node_ids = [f"node-{i}" for i in range(nodes)]
        self.voters = self.node_ids[: 3 if nodes >= 3 else 1]
        self._network_is_mine = network is None
        self.network = network or Network(self.node_ids)
        self._voter_ports = voter_ports
        self._settings = settings
        self._daemons: dict[str, Fork] = {}
        #: Sockets and RAM: short paths, and memory. Names say whose they are, as those of namespaces do.
        self._runtime = Path(tempfile.gettempdir()) / f"fcnet-{os.getpid()}-{secrets.token_hex(3)}"
        self._ram = _SHM / f"fastcheck-netlab-{os.getpid()}-{secrets.token_hex(3)}"

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            if self._network_is_mine:
                stack.enter_context(self.network)
            remove_what_is_left()
            (self.folder / "raft.key").write_bytes(secrets.token_bytes(32))
            (self.folder / "raft.key").chmod(0o600)
            for node in self.node_ids:
                self.spawn(node)
            self.wait_up(self.node_ids)
            stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._network_is_mine:
            self.network.close()
        self._remove()

    # As of a local cluster.

    def address(self, node: str) -> str:
        """Where trainers and operators find the node's daemon, from any namespace."""
        return f"unix://{self._runtime / node}/fastcheckd.sock"

    def log_file(self, node: str) -> Path:
        """The node's log, through all its lives."""
        return self.folder / f"{node}.log"

    def ram_dir(self, node: str) -> Path:
        """The node's RAM store."""
        return self._ram / node

    def pids(self, node: str) -> list[int]:
        """The node's living processes, their parent first."""
        return [process.pid for process in node_processes(self._daemon(node))]

    def kill(self, node: str, *, wipe: bool = False) -> None:
        """SIGKILL the node's processes; with `wipe` its RAM goes too."""
        kill_all(self._daemon(node))
        self._daemons.pop(node).wait(10)
        if wipe:
            shutil.rmtree(self.ram_dir(node))

    def start(self, node: str) -> None:
        """Start a killed node again, and wait until it is UP."""
        self.spawn(node)
        self.wait_up([node])

    def spawn(self, node: str) -> None:
        """Start a node's daemon on its machine."""
        config = self._config(node)
        path = self.folder / f"{node}.json"
        path.write_text(json.dumps(config))  # JSON is YAML
        for key in ("runtime_dir", "state_dir", "ram_dir"):
            Path(config[key]).mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log_file(node).open("ab") as log:
            self._daemons[node] = Fork(
                ["-c", f"import {_DAEMON} as it; it.run_daemon()", self.network.namespace(node), path],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), preload=[_DAEMON],
            )  # fmt: skip

    def wait_up(self, nodes: Sequence[str], timeout_s: float = UP_TIMEOUT_S) -> None:
        """Wait until the nodes are UP in the lives that their agents have.

        Raises:
            AssertionError: they are not, in time; with the end of a log.
        """
        deadline = time.monotonic() + timeout_s
        for node in nodes:
            while not self._is_up(node):
                assert time.monotonic() < deadline, f"{node} is not UP:\n{tail(self.log_file(node))}"
                assert self._daemons[node].poll() is None, f"{node} ended:\n{tail(self.log_file(node))}"
                time.sleep(0.05)

    # What only a lab can say.

    def train(self, node: str, program: str, *arguments: object) -> str:
        """Run a Python program on the node's machine, as its trainer; what it printed.

        Raises:
            AssertionError: it failed; with what it said.
        """
        done = run(
            ["-c", f"{_ENTER}\n{program}", self.network.namespace(node), *arguments],
            env=_environment() | {"FASTCHECK_ADDRESS": self.address(node)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def members(self, ask: str) -> dict[str, tuple[str, int]]:
        """State and incarnation of all nodes, as told through `ask`; empty when it has no answer."""
        try:
            with AdminClient(self.address(ask), timeout_s=5) as admin:
                return {n["node_id"]: (n["state"], n["incarnation"]) for n in admin.nodes()["nodes"]}
        except FastCheckError:
            return {}

    def _daemon(self, node: str) -> ProcessRef:
        daemon = self._daemons[node]
        try:
            return ProcessRef.of(daemon.pid)
        except psutil.NoSuchProcess:
            return ProcessRef(daemon.pid, 0.0)

    def _is_up(self, node: str) -> bool:
        try:
            with AdminClient(self.address(node), timeout_s=2) as admin:
                incarnation = admin.describe()["incarnation"]
                found = next((n for n in admin.nodes()["nodes"] if n["node_id"] == node), None)
        except FastCheckError:
            return False
        if found is None or not found["reachable"]:
            return False
        return (found["state"], found["incarnation"]) == ("UP", incarnation)

    def _config(self, node: str) -> dict[str, Any]:
        return {
            "cluster_id": self._ram.name,
            "node_id": node,
            "host": self.network.address(node),
            "voters": [
                {
                    "node_id": voter,
                    "registry_address": f"{self.network.address(voter)}:{self._voter_ports[0]}",
                    "raft_address": f"{self.network.address(voter)}:{self._voter_ports[1]}",
                }
                for voter in self.voters
            ],
            "insecure": True,
            "raft_key_file": str(self.folder / "raft.key"),
            "runtime_dir": str(self._runtime / node),
            "state_dir": str(self.folder / node / "state"),
            "ram_dir": str(self.ram_dir(node)),
            "ram_budget_bytes": "256MiB",
            **{key: value(node) if callable(value) else value for key, value in self._settings.items()},
        }

    def _remove(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait(10)
        self._daemons.clear()
        for folder in (self._runtime, self._ram):
            shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FASTCHECK_")}
    return kept | {"PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)}


def remove_what_is_left() -> None:
    """Networks, daemons and memory of runs that were killed."""
    remove_leftovers()
    for folder in [*_SHM.glob("fastcheck-netlab-*"), *Path(tempfile.gettempdir()).glob("fcnet-*")]:
        made = re.fullmatch(r"(?:fastcheck-netlab|fcnet)-(\d+)-\w+", folder.name)
        if made and not lives(int(made[1])):
            shutil.rmtree(folder, ignore_errors=True)
