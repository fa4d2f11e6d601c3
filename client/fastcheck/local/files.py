"""What a local cluster has on disk: its nodes and ports, their configs, folders, keys and certificates.

Everything that must outlive a process is in `DIR/cluster.json`. `layout.py` decides on places and configs.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from ..certs import LocalAuthority
from ..errors import FastCheckError
from . import layout
from .layout import NodePorts
from .ports import find_free_ports

Json = dict[str, Any]

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


class ClusterFiles:
    """The files of the cluster in one folder. Whoever changes them holds `locked`.

    Args:
        cluster_dir: its folder.
        say: told one short sentence per thing that is unusual.
    """

    def __init__(self, cluster_dir: Path, say: Callable[[str], None]) -> None:
        self.dir = cluster_dir
        self._say = say
        self.state_file = cluster_dir / "cluster.json"
        self._tls_dir = cluster_dir / "tls"
        self._raft_key = cluster_dir / "raft.key"

    def config_file(self, node_id: str) -> Path:
        """A node's configuration."""
        return layout.node_dir(self.dir, node_id) / "config.yaml"

    def daemon_file(self, node_id: str) -> Path:
        """The file that names the node's daemon: `processes.read_reference`."""
        return layout.node_dir(self.dir, node_id) / "daemon.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One change at a time, of all processes."""
        with (self.dir / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def nodes(self) -> dict[str, LocalNode]:
        """All nodes, by id; raises LocalClusterError where there is no cluster."""
        return {
            name: LocalNode(**entry | {"ports": NodePorts(**entry["ports"])})
            for name, entry in self._load()["nodes"].items()
        }

    def node(self, node_id: str) -> LocalNode:
        """One node; raises LocalClusterError where there is none of that id."""
        nodes = self.nodes()
        if node_id not in nodes:
            raise LocalClusterError(f"there is no {node_id} in {self.dir}; nodes: {', '.join(nodes)}")
        return nodes[node_id]

    def create(
        self,
        count: int,
        tolerate: int,
        ram_budget: str | int | None,
        settings: dict[str, Any],
        *,
        tls: bool,
    ) -> None:
        """Write everything for a fresh cluster of so many nodes; the arguments are those of `LocalCluster.up`."""
        names = [layout.node_id(index) for index in range(count)]
        voters = names[: layout.voter_count(count)]
        free = iter(find_free_ports(4 * count + 2 * len(voters)))
        ports = {name: _take_ports(free, voter=name in voters) for name in names}
        budget = ram_budget or max(layout.RAM_PER_NODE_BYTES_MIN, psutil.virtual_memory().total // 2 // count)
        self._raft_key.unlink(missing_ok=True)
        with os.fdopen(os.open(self._raft_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
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
                "ram_root": str(self._ram_root(count, ram_budget)),
                "settings": settings,
                "voters": {name: dataclasses.asdict(ports[name]) for name in voters},
                "nodes": {},
            }
        )
        for name in names:
            self._write_node(name, ports[name])

    def _ram_root(self, count: int, ram_budget: str | int | None) -> Path:
        # Where nobody asked for more, what every node needs at least will do.
        each = ram_budget if isinstance(ram_budget, int) else layout.RAM_PER_NODE_BYTES_MIN
        shm_free = shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0
        found = layout.ram_root(self.dir, _SHM, shm_free, each * count)
        if found.parent == self.dir:
            self._say(f"{_SHM} is missing or too small, so the RAM directories are below {self.dir}")
        return found

    def add_node(self, node_id: str) -> None:
        """Write everything for one more node, which does not vote."""
        if not layout.is_node_id(node_id):
            raise LocalClusterError(f"{node_id!r} cannot be added: name it node-N")
        nodes = self.nodes()
        if len(nodes) >= layout.NODES_MAX:
            raise LocalClusterError(f"a local cluster has at most {layout.NODES_MAX} nodes")
        taken = {p for n in nodes.values() for p in dataclasses.astuple(n.ports) if p is not None}
        self._write_node(node_id, _take_ports(iter(find_free_ports(4, avoid=frozenset(taken))), voter=False))

    def _write_node(self, name: str, ports: NodePorts) -> None:
        state = self._load()
        ram_dir = Path(state["ram_root"]) / name
        tls: dict[str, Any] = {}
        if state["tls"]:
            cert = LocalAuthority(self._tls_dir).node(name, ["127.0.0.1"])
            tls = layout.tls_settings(self._tls_dir, cert)
        config = layout.node_config(
            self.dir,
            name,
            ports,
            {voter: NodePorts(**entry) for voter, entry in state["voters"].items()},
            cluster_id=state["cluster_id"],
            tolerate=state["tolerate"],
            ram_dir=ram_dir,
            ram_budget=state["ram_budget"],
            settings=tls | state["settings"],
        )
        layout.node_dir(self.dir, name).mkdir(parents=True, exist_ok=True)
        self.config_file(name).write_text(yaml.safe_dump(config, sort_keys=False))
        node = LocalNode(
            node_id=name,
            address=f"unix://{layout.runtime_dir(self.dir, name)}/fastcheckd.sock",
            ram_dir=str(ram_dir),
            ports=ports,
        )
        state["nodes"][name] = dataclasses.asdict(node)
        self._save(state)

    def make_folders(self, config: Json) -> None:
        """Make the folders that a node's configuration names."""
        for outside in (layout.runtime_root(self.dir), Path(self._load()["ram_root"])):
            if outside is not None:
                _make_private(outside)
        for made in (config["runtime_dir"], config["state_dir"], config["ram_dir"]):
            Path(made).mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove(self) -> None:
        """Delete everything of a cluster except its logs; the state file last."""
        state = self._load()
        for name in state["nodes"]:
            folder = layout.node_dir(self.dir, name)
            for part in (folder / "state", folder / "run"):
                shutil.rmtree(part, ignore_errors=True)
            self.config_file(name).unlink(missing_ok=True)
            self.daemon_file(name).unlink(missing_ok=True)
        for root in (layout.runtime_root(self.dir), Path(state["ram_root"])):
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
        self._raft_key.unlink(missing_ok=True)
        shutil.rmtree(self._tls_dir, ignore_errors=True)
        self.state_file.unlink()

    def _load(self) -> Json:
        try:
            loaded: Json = json.loads(self.state_file.read_text())
        except FileNotFoundError:
            raise LocalClusterError(
                f"there is no local cluster in {self.dir}; start one with: "
                f"fastcheck local up --dir {self.dir}"
            ) from None
        return loaded

    def _save(self, state: Json) -> None:
        temporary = self.state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=2) + "\n")
        temporary.replace(self.state_file)


def _take_ports(free: Iterator[int], *, voter: bool) -> NodePorts:
    agent, data, lane, metrics = next(free), next(free), next(free), next(free)
    if not voter:
        return NodePorts(agent=agent, data=data, lane=lane, metrics=metrics)
    return NodePorts(agent=agent, data=data, lane=lane, metrics=metrics, registry=next(free), raft=next(free))


def _make_private(folder: Path) -> None:
    """Make a folder with a predictable name in a shared place; refuse one that belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise LocalClusterError(f"{folder} exists and is not a folder of this user; remove it")
