"""A local cluster: up, kill, start, down, status. What is on disk is in `files.py`.

The command line, tests and the demo may each take a turn. Files are changed under a lock; waiting is done outside of
it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from ..admin import AdminClient
from ..errors import FastCheckError
from . import layout, processes
from .files import ClusterFiles, LocalClusterError
from .processes import ProcessRef, launcher
from .reaper import start_reaper

Json = dict[str, Any]

_POLL_S = 0.1
#: Beyond the daemons' own grace (shutdown_grace_s) before SIGKILL.
_STOP_TIMEOUT_S = 8.0
_SHM = Path("/dev/shm")  # noqa: S108  the machine's shared-memory tmpfs; our folder in it is 0700 and owned


class LocalCluster:
    """The cluster in one folder. As a context manager it is taken down at the end, whatever happened: also when this
    process is killed (`reaper.py`). Otherwise a cluster that is up stays up, whoever ends.

    Args:
        cluster_dir: its folder; made by `up`.
        on_event: told one short sentence per thing that happens.
    """

    def __init__(
        self, cluster_dir: Path | str | None = None, *, on_event: Callable[[str], None] | None = None
    ) -> None:
        self._say = on_event or (lambda text: None)
        self._files = ClusterFiles(
            Path(cluster_dir).absolute() if cluster_dir else layout.default_dir(), self._say
        )
        self.dir = self._files.dir
        #: Whether the cluster is to end with this process.
        self._entered = False
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        self._entered = True
        if self.exists:
            self._start_reaper()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()
        self._entered = False

    # -- questions

    @property
    def exists(self) -> bool:
        """Whether `up` was called here and `down` was not."""
        return self._files.state_file.exists()

    @property
    def node_ids(self) -> list[str]:
        """All nodes, running or not."""
        return list(self._files.nodes())

    def address(self, node_id: str) -> str:
        """The address of a node's daemon, for trainers and commands."""
        return self._files.node(node_id).address

    def log_file(self, node_id: str) -> Path:
        """The node's log; it survives kills and restarts."""
        return layout.node_dir(self.dir, node_id) / "daemon.log"

    def pids(self, node_id: str) -> list[int]:
        """All living processes of a node, their parent first."""
        daemon = self._daemon(node_id)
        return [p.pid for p in processes.node_processes(daemon)] if daemon else []

    def status(self) -> Json:
        """The nodes with their processes, as `local status -o json` prints them."""
        nodes = []
        for node in self._files.nodes().values():
            daemon, pids = self._daemon(node.node_id), self.pids(node.node_id)
            nodes.append(
                {
                    "node_id": node.node_id,
                    "state": "running" if daemon and daemon.find() else "stopped",
                    "address": node.address,
                    "pids": pids,
                    "ram_dir": node.ram_dir,
                    "metrics_address": f"127.0.0.1:{node.ports.metrics}",
                    "log": str(self.log_file(node.node_id)),
                }
            )
        return {"nodes": nodes, "dir": str(self.dir)}

    # -- actions

    def up(
        self,
        nodes: int = 4,
        *,
        tolerate: int = 1,
        ram_budget: str | int | None = None,
        settings: dict[str, Any] | None = None,
        tls: bool = False,
        timeout_s: float = 60.0,
    ) -> Json:
        """Start a fresh cluster and wait until all its nodes are UP.

        Args:
            nodes: how many.
            tolerate: losses at once that a committed step survives.
            ram_budget: per node, bytes or text such as `512MiB`. Default: half of the memory, divided.
            settings: further config keys for every node.
            tls: make an authority in DIR/tls, certificates for the nodes, and an operator's and a trainer's, named
                `local`; every port is under TLS.

        Raises:
            LocalClusterError: one is running here already, a daemon died, or not all are UP in time. What was
                started is stopped again, also when this process is killed meanwhile; the logs stay.
        """
        if not 1 <= nodes <= layout.NODES_MAX:
            raise LocalClusterError(f"a local cluster has 1 to {layout.NODES_MAX} nodes, not {nodes}")
        if nodes > 1 and not 1 <= tolerate < nodes:
            raise LocalClusterError(f"{nodes} nodes can tolerate 1 to {nodes - 1} losses, not {tolerate}")
        self.dir.mkdir(parents=True, exist_ok=True)
        with self._files.locked():
            if self.exists:
                if any(node["pids"] for node in self.status()["nodes"]):
                    raise LocalClusterError(
                        f"a cluster is running in {self.dir} already; end it with: "
                        f"fastcheck local down --dir {self.dir}"
                    )
                self._files.remove()
            self._files.create(nodes, tolerate, ram_budget, settings or {}, tls=tls)
        try:
            self._start_reaper()
            for node_id in self.node_ids:
                self._spawn(node_id)
            self.wait_up(self.node_ids, timeout_s=timeout_s)
        except BaseException:
            self.down()
            raise
        if not self._entered:
            self._end_reaper()
        return self.status()

    def start(self, node_id: str, *, timeout_s: float = 60.0) -> Json:
        """Start a killed node again under its old id, or add a new one (never a voter), and wait until UP.

        Raises:
            LocalClusterError: it runs already, or is not UP in time.
        """
        with self._files.locked():
            if node_id not in self._files.nodes():
                self._files.add_node(node_id)
            elif self.pids(node_id):
                raise LocalClusterError(f"{node_id} is running already")
        self._spawn(node_id)
        self.wait_up([node_id], timeout_s=timeout_s)
        return self.status()

    def kill(self, node_id: str, *, wipe: bool = False) -> list[int]:
        """SIGKILL all processes of a node at once; with `wipe` its RAM directory goes too, as in a power cut.

        Returns:
            The ids of the processes that were killed; empty when none was running.
        """
        node = self._files.node(node_id)
        daemon = self._daemon(node_id)
        killed = processes.kill_all(daemon) if daemon else []
        if wipe:
            shutil.rmtree(node.ram_dir, ignore_errors=True)
        self._say(f"killed {node_id}" + (" and deleted its RAM directory" if wipe else ""))
        return killed

    def down(self) -> None:
        """Stop all nodes, in good order if they can; delete their RAM and state. Logs stay. Repeatable."""
        if not self.exists:
            self._end_reaper()
            return
        with self._files.locked():
            daemons = [daemon for name in self._files.nodes() if (daemon := self._daemon(name)) is not None]
            for daemon in daemons:
                if (process := daemon.find()) is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            while time.monotonic() < deadline and any(processes.node_processes(d) for d in daemons):
                time.sleep(_POLL_S)
            for daemon in daemons:
                processes.kill_all(daemon)
            self._files.remove()
        self._end_reaper()
        self._say("the cluster is down")

    def wait_up(self, node_ids: Sequence[str], *, timeout_s: float) -> None:
        """Wait until these nodes are UP in their present life, as the registry sees it.

        Raises:
            LocalClusterError: a daemon ended, or time ran out; with the end of that node's log.
        """
        deadline = time.monotonic() + timeout_s
        for node_id in node_ids:
            with AdminClient(self.address(node_id), timeout_s=2.0) as client:
                why = "not asked yet"
                while (why := self._why_not_up(node_id, client)) != "":
                    daemon = self._daemon(node_id)
                    if daemon is None or daemon.find() is None:
                        raise self._failure(node_id, "ended while starting")
                    if time.monotonic() > deadline:
                        raise self._failure(node_id, f"is not UP after {timeout_s:g} s: {why}")
                    time.sleep(_POLL_S)
            self._say(f"{node_id} is UP")

    # -- parts

    def _daemon(self, node_id: str) -> ProcessRef | None:
        """The main process of the daemon that was started last; None before the first start."""
        return processes.read_reference(self._files.daemon_file(node_id))

    def _spawn(self, node_id: str) -> None:
        config_file = self._files.config_file(node_id)
        config = yaml.safe_load(config_file.read_text())
        self._files.make_folders(config)
        try:
            environment = processes.daemon_environment(config)
        except ModuleNotFoundError as error:
            raise LocalClusterError(
                f"a local cluster needs the daemon, but {error}; run: pip install 'fastcheck[daemon,cli]'"
            ) from None
        pid = launcher(environment).start(
            config_file, self.log_file(node_id), self._files.daemon_file(node_id), environment
        )
        self._say(f"started {node_id} (pid {pid})")

    def _start_reaper(self) -> None:
        """From now on the cluster is taken down when this process ends."""
        if self._reaper is None:
            self._reaper = start_reaper(self.dir, processes.own_environment())

    def _end_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
            self._reaper = None

    def _why_not_up(self, node_id: str, client: AdminClient) -> str:
        """Empty when the node is UP with the incarnation that its agent says it has."""
        try:
            incarnation = client.describe()["incarnation"]
            members = {node["node_id"]: node for node in client.nodes()["nodes"]}
        except FastCheckError as error:
            return str(error)
        member = members.get(node_id)
        if member is None:
            return "the registry does not know it yet"
        if member["state"] != "UP" or member["incarnation"] != incarnation:
            return f"the registry holds it {member['state']} in incarnation {member['incarnation']}"
        return "" if member["reachable"] else "its data process does not answer yet"

    def _failure(self, node_id: str, what: str) -> LocalClusterError:
        log = self.log_file(node_id)
        return LocalClusterError(f"{node_id} {what}\nthe end of {log}:\n{processes.tail(log)}")
