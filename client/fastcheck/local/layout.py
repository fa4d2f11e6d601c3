"""Where a local cluster keeps what, and the config of each of its nodes. Decides, writes nothing.

DIR/
  cluster.json      nodes and ports (written by rename)
  lock              flock: one change at a time
  raft.key          the voters' secret, 0600
  tls/              with --tls, an authority and what it signed (certs.py)
  node-0/           config.yaml, daemon.log, daemon.json (its process), state/ and, when the path is short, run/
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcheck_proto.conventions import check_name

#: Linux allows 107 bytes for a Unix socket's path; some room is left for names that the daemon adds.
SOCKET_PATH_BYTES_MAX = 99
_LONGEST_SOCKET_NAME = "fastcheckd.sock"
NODES_MAX = 64
#: Below this per node the shared-memory file system is too small to be used (containers often have 64 MiB).
RAM_PER_NODE_BYTES_MIN = 256 << 20


@dataclass(frozen=True, kw_only=True)
class NodePorts:
    """A node's listeners. `registry` and `raft` only exist on voters."""

    agent: int
    data: int
    lane: int
    metrics: int
    registry: int | None = None
    raft: int | None = None


def default_dir() -> Path:
    """Folder of this user's local cluster when no `--dir` is given."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "fastcheck-local"
    return Path(tempfile.gettempdir()) / f"fastcheck-local-{os.geteuid()}"


def voter_count(nodes: int) -> int:
    """Voters among so many nodes: 1 below 3, 3 from 3 on, 5 from 9 on."""
    if nodes < 3:
        return 1
    return 3 if nodes < 9 else 5


def node_id(index: int) -> str:
    """`node-0`, `node-1`, ..."""
    return f"node-{index}"


def is_node_id(name: str) -> bool:
    """Whether a local cluster may have a node of that name."""
    return re.fullmatch(r"node-\d{1,4}", name) is not None


def cluster_key(cluster_dir: Path) -> str:
    """Short name of this user's cluster in this folder: names folders outside of it."""
    text = f"{os.geteuid()}:{cluster_dir.absolute()}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def node_dir(cluster_dir: Path, name: str) -> Path:
    """Folder of one node's config, log and state."""
    return cluster_dir / name


def runtime_root(cluster_dir: Path) -> Path | None:
    """Folder of all nodes' sockets when DIR itself is too deep for socket paths; None when it is not."""
    deepest = node_dir(cluster_dir, node_id(9999)) / "run" / _LONGEST_SOCKET_NAME
    if len(os.fsencode(deepest)) <= SOCKET_PATH_BYTES_MAX:
        return None
    temporary = Path(tempfile.gettempdir())
    # TMPDIR may itself be deep (test runners do that).
    base = temporary if len(os.fsencode(temporary)) <= 40 else Path("/tmp")  # noqa: S108  made 0700 and owned
    return base / f"fastcheck-run-{cluster_key(cluster_dir)}"


def runtime_dir(cluster_dir: Path, name: str) -> Path:
    """Folder of one node's sockets."""
    root = runtime_root(cluster_dir)
    return node_dir(cluster_dir, name) / "run" if root is None else root / name


def ram_root(cluster_dir: Path, shm: Path, shm_free_bytes: int, needed_bytes: int) -> Path:
    """Folder of all nodes' RAM directories: in shared memory when it has the room, else below DIR."""
    if shm_free_bytes >= needed_bytes:
        return shm / f"fastcheck-local-{cluster_key(cluster_dir)}"
    return cluster_dir / "ram"


def tls_settings(tls_dir: Path, cert: Path) -> dict[str, Any]:
    """The config keys of a node with that certificate; its key lies beside it."""
    return {
        "tls_cert_file": str(cert),
        "tls_key_file": str(cert.with_name(f"{cert.stem}.key")),
        "tls_ca_file": str(tls_dir / "ca.pem"),
        "lane_tls": True,
    }


def node_config(
    cluster_dir: Path,
    name: str,
    ports: NodePorts,
    voters: dict[str, NodePorts],
    *,
    cluster_id: str,
    tolerate: int,
    ram_dir: Path,
    ram_budget: str | int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """One node's config file as a mapping, with the keys of the daemon's config.

    Args:
        voters: node id → ports of the registry's voters.
        ram_budget: bytes, or text such as `512MiB`.
        settings: further keys, which win.
    """
    check_name("node_id", name)
    return {
        "cluster_id": cluster_id,
        "node_id": name,
        "host": "127.0.0.1",
        "agent_port": ports.agent,
        "data_port": ports.data,
        "lane_port": ports.lane,
        "metrics_address": f"127.0.0.1:{ports.metrics}",
        "voters": [
            {
                "node_id": voter,
                "registry_address": f"127.0.0.1:{voter_ports.registry}",
                "raft_address": f"127.0.0.1:{voter_ports.raft}",
            }
            for voter, voter_ports in voters.items()
        ],
        "raft_key_file": str(cluster_dir / "raft.key"),
        "runtime_dir": str(runtime_dir(cluster_dir, name)),
        "state_dir": str(node_dir(cluster_dir, name) / "state"),
        "ram_dir": str(ram_dir),
        "ram_budget_bytes": ram_budget,
        "tolerate": tolerate,
        # The daemon wants at least as many holders as copies; three is its own default.
        "spread": max(3, tolerate),
        **settings,
    }
