"""A local cluster: up, kill, start, down, status. `layout.py` decides on files, folders and configs.

Everything that must outlive this process is in `DIR/cluster.json`, so the command line, tests and the demo
may each take a turn. Changes to that file are made under a lock; waiting is done outside of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from ..admin import AdminClient
from ..certs import LocalAuthority
from ..errors import FastCheckError
from . import layout, processes
from .layout import NodePorts
from .ports import find_free_ports
from .processes import ProcessRef, launcher
from .reaper import start_reaper

Json = dict[str, Any]

_POLL_S = 0.1
#: Beyond the daemons' own grace (shutdown_grace_s) before SIGKILL.
_STOP_TIMEOUT_S = 8.0
_SHM = Path("/dev/shm")  # noqa: S108  the machine's shared-memory tmpfs; our folder in it is 0700 and owned


class LocalClusterError(FastCheckError):
    """The local cluster could not do what was asked; the message ends with the log of the node concerned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalNode:
    """One node as recorded in cluster.json."""

    node_id: str
    address: str
    ram_dir: str
    ports: NodePorts


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
        self.dir = Path(cluster_dir).absolute() if cluster_dir else layout.default_dir()
        self._say = on_event or (lambda text: None)
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
        return self._state_file.exists()

    @property
    def node_ids(self) -> list[str]:
        """All nodes, running or not."""
        return list(self._nodes())

    def address(self, node_id: str) -> str:
        """The address of a node's daemon, for trainers and commands."""
        return self._node(node_id).address

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
        for node in self._nodes().values():
            daemon, pids = self._daemon(node.node_id), self.pids(node.node_id)
            nodes.append(
                {
                    "node_id": node.node_id,
                    "state": "running" if daemon and daemon.find() else "stopped",
                    "address": node.address,
                    "pids": pids,
                    "ram_dir": node.ram_dir,
                    "metrics_address": f"127.0.0.1:{node.ports.metrics}" if node.ports.metrics else "",
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
        with self._locked():
            if self.exists:
                if any(node["pids"] for node in self.status()["nodes"]):
                    raise LocalClusterError(
                        f"a cluster is running in {self.dir} already; end it with: "
                        f"fastcheck local down --dir {self.dir}"
                    )
                self._remove_data()
            self._make_config(nodes, tolerate, ram_budget, settings or {}, tls=tls)
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
        with self._locked():
            if node_id not in self._nodes():
                self._add_node(node_id)
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
        node = self._node(node_id)
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
        with self._locked():
            daemons = [daemon for name in self._nodes() if (daemon := self._daemon(name)) is not None]
            for daemon in daemons:
                if (process := daemon.find()) is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            while time.monotonic() < deadline and any(processes.node_processes(d) for d in daemons):
                time.sleep(_POLL_S)
            for daemon in daemons:
                processes.kill_all(daemon)
            self._remove_data()
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

    @property
    def _state_file(self) -> Path:
        return self.dir / "cluster.json"

    @property
    def _tls_dir(self) -> Path:
        return self.dir / "tls"

    def _certified(self, name: str) -> dict[str, Any]:
        """The config keys of a node with a certificate, which is made now."""
        cert = LocalAuthority(self._tls_dir).node(name, ["127.0.0.1"])
        return layout.tls_settings(self._tls_dir, cert)

    def _config_file(self, node_id: str) -> Path:
        return layout.node_dir(self.dir, node_id) / "config.yaml"

    def _daemon_file(self, node_id: str) -> Path:
        return layout.node_dir(self.dir, node_id) / "daemon.json"

    def _daemon(self, node_id: str) -> ProcessRef | None:
        """The main process of the daemon that was started last; None before the first start."""
        return processes.read_reference(self._daemon_file(node_id))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.dir / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _load(self) -> Json:
        try:
            loaded: Json = json.loads(self._state_file.read_text())
        except FileNotFoundError:
            raise LocalClusterError(
                f"there is no local cluster in {self.dir}; start one with: "
                f"fastcheck local up --dir {self.dir}"
            ) from None
        return loaded

    def _save(self, state: Json) -> None:
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=2) + "\n")
        temporary.replace(self._state_file)

    def _nodes(self) -> dict[str, LocalNode]:
        return {name: _node_from_json(entry) for name, entry in self._load()["nodes"].items()}

    def _node(self, node_id: str) -> LocalNode:
        nodes = self._nodes()
        if node_id not in nodes:
            raise LocalClusterError(f"there is no {node_id} in {self.dir}; nodes: {', '.join(nodes)}")
        return nodes[node_id]

    def _make_config(
        self,
        count: int,
        tolerate: int,
        ram_budget: str | int | None,
        settings: dict[str, Any],
        *,
        tls: bool,
    ) -> None:
        names = [layout.node_id(index) for index in range(count)]
        voters = names[: layout.voter_count(count)]
        free = iter(find_free_ports(4 * count + 2 * len(voters)))
        ports = {name: _take_ports(free, voter=name in voters) for name in names}
        budget = ram_budget or max(layout.RAM_PER_NODE_BYTES_MIN, psutil.virtual_memory().total // 2 // count)
        needed = (budget if isinstance(budget, int) else layout.RAM_PER_NODE_BYTES_MIN) * count
        shm_free = shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0
        if ram_budget is None:  # nobody asked for that much: what every node needs at least will do
            needed = min(needed, layout.RAM_PER_NODE_BYTES_MIN * count)
        ram_root = layout.ram_root(self.dir, _SHM, shm_free, needed)
        if ram_root.parent == self.dir:
            self._say(f"{_SHM} is missing or too small, so the RAM directories are below {self.dir}")
        key = self.dir / "raft.key"
        key.unlink(missing_ok=True)
        with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        # A cluster of its own: a stray node of an earlier one is refused.
        cluster_id = f"local-{secrets.token_hex(4)}"
        shutil.rmtree(self._tls_dir, ignore_errors=True)
        if tls:
            authority = LocalAuthority.create(self._tls_dir, cluster_id)
            authority.admin("local")
            authority.trainer("local")
        self._save(
            {
                "version": 1,
                "cluster_id": cluster_id,
                "tls": tls,
                "tolerate": tolerate,
                "ram_budget": budget,
                "ram_root": str(ram_root),
                "settings": settings,
                "voters": {name: dataclasses.asdict(ports[name]) for name in voters},
                "nodes": {},
            }
        )
        for name in names:
            self._write_node(name, ports[name])

    def _add_node(self, node_id: str) -> None:
        if not layout.is_node_id(node_id):
            raise LocalClusterError(f"{node_id!r} cannot be added: name it node-N")
        nodes = self._nodes()
        if len(nodes) >= layout.NODES_MAX:
            raise LocalClusterError(f"a local cluster has at most {layout.NODES_MAX} nodes")
        taken = {p for n in nodes.values() for p in dataclasses.astuple(n.ports) if p is not None}
        self._write_node(node_id, _take_ports(iter(find_free_ports(4, avoid=frozenset(taken))), voter=False))

    def _write_node(self, name: str, ports: NodePorts) -> None:
        state = self._load()
        ram_dir = Path(state["ram_root"]) / name
        config = layout.node_config(
            self.dir,
            name,
            ports,
            {voter: NodePorts(**entry) for voter, entry in state["voters"].items()},
            cluster_id=state["cluster_id"],
            tolerate=state["tolerate"],
            ram_dir=ram_dir,
            ram_budget=state["ram_budget"],
            settings=(self._certified(name) if state.get("tls") else {}) | state["settings"],
        )
        folder = layout.node_dir(self.dir, name)
        folder.mkdir(parents=True, exist_ok=True)
        self._config_file(name).write_text(yaml.safe_dump(config, sort_keys=False))
        node = LocalNode(
            node_id=name,
            address=f"unix://{layout.runtime_dir(self.dir, name)}/fastcheckd.sock",
            ram_dir=str(ram_dir),
            ports=ports,
        )
        state["nodes"][name] = dataclasses.asdict(node)
        self._save(state)

    def _spawn(self, node_id: str) -> None:
        config_file = self._config_file(node_id)
        config = yaml.safe_load(config_file.read_text())
        for outside in (layout.runtime_root(self.dir), Path(self._load()["ram_root"])):
            if outside is not None:
                _make_private(outside)
        for made in (config["runtime_dir"], config["state_dir"], config["ram_dir"]):
            Path(made).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            environment = processes.daemon_environment(config)
        except ModuleNotFoundError as error:
            raise LocalClusterError(
                f"a local cluster needs the daemon, but {error}; run: pip install 'fastcheck[daemon,cli]'"
            ) from None
        if "metrics_address" not in config:
            # Written by a version without metrics, which may be started from it again. All nodes are on this machine,
            # and would have the default port.
            environment["FASTCHECK_METRICS_ADDRESS"] = "''"
        pid = launcher(environment).start(
            config_file, self.log_file(node_id), self._daemon_file(node_id), environment
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

    def _remove_data(self) -> None:
        """Delete everything of a cluster except its logs; the state file last."""
        state = self._load()
        for name in state["nodes"]:
            folder = layout.node_dir(self.dir, name)
            for part in (folder / "state", folder / "run"):
                shutil.rmtree(part, ignore_errors=True)
            self._config_file(name).unlink(missing_ok=True)
            self._daemon_file(name).unlink(missing_ok=True)
        for root in (layout.runtime_root(self.dir), Path(state["ram_root"])):
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
        (self.dir / "raft.key").unlink(missing_ok=True)
        shutil.rmtree(self._tls_dir, ignore_errors=True)
        self._state_file.unlink()


def _take_ports(free: Iterator[int], *, voter: bool) -> NodePorts:
    agent, data, lane, metrics = next(free), next(free), next(free), next(free)
    if not voter:
        return NodePorts(agent=agent, data=data, lane=lane, metrics=metrics)
    return NodePorts(agent=agent, data=data, lane=lane, metrics=metrics, registry=next(free), raft=next(free))


def _node_from_json(entry: Json) -> LocalNode:
    return LocalNode(
        node_id=entry["node_id"],
        address=entry["address"],
        ram_dir=entry["ram_dir"],
        ports=NodePorts(**entry["ports"]),
    )


def _make_private(folder: Path) -> None:
    """Make a folder with a predictable name in a shared place; refuse one that belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise LocalClusterError(f"{folder} exists and is not a folder of this user; remove it")
