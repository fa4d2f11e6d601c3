"""The daemon's whole configuration: one frozen dataclass, checked when it is made.

Every default works on one machine; each says why it is what it is. Where values come from is in `config_sources.py`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fastcheck_proto.conventions import check_name, default_runtime_dir

from .errors import ConfigError

LABELS_MAX = 16
#: Of `token_issuer` and `token_audience`.
TOKEN_WORD_CHARS_MAX = 256
PACINGS = ("off", "adaptive")
CODEC_POLICIES = ("auto", "always", "never")


def _default_node_id() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:128] or "node"


def _default_ram_dir() -> Path:
    shm = Path("/dev/shm")  # noqa: S108  the machine's shared-memory tmpfs, not a temp file
    base = shm if shm.is_dir() else Path(tempfile.gettempdir())
    return base / f"fastcheck-{os.geteuid()}"


def _default_state_dir() -> Path:
    return Path("/var/lib/fastcheck") if os.geteuid() == 0 else Path.home() / ".local/state/fastcheck"


@dataclass(frozen=True, kw_only=True)
class Voter:
    """A node that takes part in the registry's consensus."""

    node_id: str
    #: host:port of its registry process' gRPC face.
    registry_address: str
    #: host:port of its Raft listener. Only voters speak to it.
    raft_address: str


#: Times that may be longer, or none.
_OTHER_RANGES = frozenset({"scrub_period_s", "drain_on_stop_s"})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What one node runs with. Sizes in bytes, times in seconds."""

    #: Nodes of another cluster are refused: a config copied to the wrong place does no harm.
    cluster_id: str = "fastcheck"
    #: Survives restarts; by default the host's name.
    node_id: str = field(default_factory=_default_node_id)
    #: Address to listen on and to be reached under. Loopback: one machine works with no setup.
    host: str = "127.0.0.1"
    #: The agent's: voters' probes, operators, trainers without a daemon of their own.
    agent_port: int = 7450
    #: The data process': its peers, agents of other nodes, trainers without a daemon of their own.
    data_port: int = 7451
    #: The bulk lane's: data processes of other nodes.
    lane_port: int = 7452
    #: Network of the bulk lane, which shards travel on: an IP address of this machine or the name of an interface.
    #: Peers are told this address, and connections to them come from it. Empty: `host`.
    lane_host: str = ""
    #: The registry's voters: 1, 3 or 5 nodes, the same list on every node. Empty: this node alone.
    voters: tuple[Voter, ...] = ()
    #: File with the 32+ byte secret that voters share, mode 0600. This or TLS is required as soon as there is more
    #: than one voter or one is not on loopback; a voter alone on loopback makes its own. Not used with TLS.
    raft_key_file: Path | None = None
    #: This node's certificate, its key, and the authority that signs all certificates of the cluster, in PEM. With them
    #: every port takes only who shows a certificate too (docs/security.md); all three or none, alike on all nodes.
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_ca_file: Path | None = None
    #: Trainers' bearer tokens (docs/security.md): the public keys of their issuer (JWKS), its name (`iss`), and whom
    #: they are for (`aud`); all three or none, alike on all nodes. With them a trainer on a Unix socket needs one.
    token_jwks_file: Path | None = None
    token_issuer: str = ""
    token_audience: str = ""
    #: Serve other machines without certificates: whoever reaches a port reads and changes everything.
    insecure: bool = False

    #: Sockets; small, may vanish with a reboot.
    runtime_dir: Path = field(default_factory=default_runtime_dir)
    #: The registry's journal; must survive a restart of the process and should survive a reboot.
    state_dir: Path = field(default_factory=_default_state_dir)
    #: The RAM store: a folder on a tmpfs. Must survive a restart of the process.
    ram_dir: Path = field(default_factory=_default_ram_dir)
    #: Most that the RAM store may take. Half of the memory: the other half is the trainer's.
    ram_budget_bytes: int = field(default_factory=lambda: psutil.virtual_memory().total // 2)
    #: Most of it that one job may have, its own states and the copies that are held for it together; 0: no limit but
    #: the node's. For nodes that jobs share: no job can fill one and keep the others' steps out (docs/operations.md).
    job_budget_bytes: int = 0

    #: What this node says of itself, such as {rack: a1, zone: b}; `failure_domain` names the one that counts.
    labels: dict[str, str] = field(default_factory=dict)
    #: Label whose values fail together: copies of a shard go to different ones. Empty: every node by itself.
    failure_domain: str = ""

    #: Node losses at once that a committed step survives, owner included: copies on other nodes.
    tolerate: int = 1
    #: Holders that one rank's shards are spread over. Enough that a restore pulls from several,
    #: few enough that two losses seldom meet in one group.
    spread: int = 3
    #: Committed steps kept per job. More than the newest only serve to go back, at a state each here and at holders.
    keep_steps: int = 1
    #: Steps of a rank under way before `save` waits for the oldest.
    max_in_flight: int = 2
    #: Unit of checking and resending. Small enough to stay in cache between hash and send.
    chunk_bytes: int = 4 << 20
    #: Connections per shard transfer. One TCP stream alone sometimes stays in a slow mode.
    lane_streams: int = 2
    #: TCP congestion control of the lane, one of `sysctl net.ipv4.tcp_available_congestion_control`;
    #: empty: the system's. Where that is bbr, cubic is faster on loopback.
    lane_congestion: str = ""
    #: Most that this node sends per second to make copies of its steps; 0: no limit of its own.
    replicate_bytes_per_s: int = 0
    #: `adaptive`: copies give way to other traffic on the lane's interface, as far as they are still made before the
    #: next save. `off`: they compete with it. Restores go before them in any case.
    pacing: str = "adaptive"
    #: Lanes under mutual TLS, with the certificates above. The same on all nodes. Costs cores: off where the network is
    #: the cluster's own.
    lane_tls: bool = False
    #: Threads that hash and copy in the data process. Half the cores: the trainer comes first.
    worker_threads: int = field(default_factory=lambda: max(2, (os.cpu_count() or 2) // 2))
    #: What travels to holders and readers: `auto` encodes what makes it faster, `always` everything that shrinks,
    #: `never` nothing. Auto: whether encoding pays depends on the link and the cores, and both are measured
    #: (transfer/policy.py).
    codec: str = "auto"
    #: Threads that encode and decode. Half the cores: the trainer comes first.
    codec_threads: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) // 2))
    #: Niceness of those threads, on top of the daemon's own: what sends and receives goes before them, too.
    codec_nice: int = 10

    #: A sign of life to every voter this often.
    heartbeat_interval_s: float = 0.1
    #: Silence after which a node is suspected and probed.
    suspect_after_s: float = 0.4
    #: Silence at a majority of the voters after which a node that other nodes cannot reach either is DOWN.
    down_after_s: float = 0.8
    #: A node's own right to take copies, counted from the last heartbeat that a majority answered. Shorter
    #: than `down_after_s`: when the others may call it DOWN, it has already stopped by itself.
    lease_s: float = 0.6
    #: How long a node that is asked directly, by the leader or for it, has for its answer.
    probe_timeout_s: float = 0.25
    #: A data process that makes no progress for this long is hung; before, it is just busy.
    data_hung_after_s: float = 10.0
    #: Without an answer of the registry for this long, steps are replicated provisionally.
    provisional_after_s: float = 1.0
    #: Most that a node fetches per second to make lost copies anew. A quarter of a 10 Gbit/s link.
    repair_bytes_per_s: int = 300_000_000
    #: Every replica is checked against its digest again within this time.
    scrub_period_s: float = 3600.0
    #: A transfer that moves no byte for this long has failed.
    transfer_timeout_s: float = 10.0
    #: A peer that just failed us gets nothing from us for this long.
    quarantine_s: float = 5.0
    #: A step that makes no progress for this long may be given up for a newer one.
    stall_after_s: float = 2.0
    #: A step that makes no progress for this long has failed.
    commit_timeout_s: float = 60.0
    #: How long a replicated rank waits for the other ranks of its step.
    rank_wait_timeout_s: float = 600.0
    #: How long SIGTERM waits for work under way.
    shutdown_grace_s: float = 5.0
    #: How long a node that is stopped may first take to have its copies made elsewhere; 0: it does not. Most stops are
    #: restarts, and RAM outlives them.
    drain_on_stop_s: float = 0.0
    #: host:port of /metrics, /livez, /readyz and /safe-to-stop, HTTP without encryption; empty: none. Loopback: numbers
    #: tell of jobs by name. Off it, let a network policy say who may scrape.
    metrics_address: str = "127.0.0.1:7455"
    #: host:port of /livez, /readyz and /safe-to-stop alone, and of gRPC's health service, without encryption: for
    #: probes that cannot do TLS. Empty: none.
    health_address: str = ""
    #: `human` or `json`, one line per event on stderr.
    log_format: str = "human"

    def __post_init__(self) -> None:
        def need(ok: bool, key: str, why: str) -> None:
            if not ok:
                raise ConfigError(f"config key '{key}' = {getattr(self, key)!r}: {why}")

        for key in ("cluster_id", "node_id"):
            try:
                check_name(key, getattr(self, key))
            except ValueError as error:
                raise ConfigError(str(error)) from None
        need(bool(self.host) and " " not in self.host, "host", "must be an address or a host name")
        need(" " not in self.lane_host, "lane_host", "must be an IP address or the name of an interface")
        for key in ("agent_port", "data_port", "lane_port"):
            need(1 <= getattr(self, key) <= 65535, key, "must be a port from 1 to 65535")
        ports = [self.agent_port, self.data_port, self.lane_port]
        need(len(set(ports)) == 3, "lane_port", "agent_port, data_port and lane_port must differ")
        need(1 <= self.tolerate <= 8, "tolerate", "must be from 1 to 8")
        need(self.spread >= self.tolerate, "spread", "must be at least tolerate")
        need(1 <= self.keep_steps <= 100, "keep_steps", "must be from 1 to 100")
        need(1 <= self.max_in_flight <= 16, "max_in_flight", "must be from 1 to 16")
        need(64 << 10 <= self.chunk_bytes <= 16 << 20, "chunk_bytes", "must be from 64 KiB to 16 MiB")
        need(self.chunk_bytes % 4096 == 0, "chunk_bytes", "must be a multiple of 4096")
        need(1 <= self.lane_streams <= 16, "lane_streams", "must be from 1 to 16")
        need(1 <= self.worker_threads <= 256, "worker_threads", "must be from 1 to 256")
        need(self.codec in CODEC_POLICIES, "codec", f"must be one of {', '.join(CODEC_POLICIES)}")
        need(1 <= self.codec_threads <= 256, "codec_threads", "must be from 1 to 256")
        need(0 <= self.codec_nice <= 19, "codec_nice", "must be from 0 to 19")
        need(self.ram_budget_bytes >= 1 << 20, "ram_budget_bytes", "must be at least 1 MiB")
        need(
            self.job_budget_bytes == 0 or self.job_budget_bytes >= 1 << 20,
            "job_budget_bytes",
            "must be at least 1 MiB, or 0 for no limit",
        )
        need(self.log_format in {"human", "json"}, "log_format", "must be 'human' or 'json'")
        for label, value in self.labels.items():
            for part in (label, value):
                try:
                    check_name("labels", part)
                except ValueError as error:
                    raise ConfigError(f"config key 'labels': {error}") from None
        need(len(self.labels) <= LABELS_MAX, "labels", f"must be at most {LABELS_MAX}")
        need(
            not self.failure_domain or self.failure_domain in self.labels,
            "failure_domain",
            "must be one of this node's labels",
        )
        need(
            self.replicate_bytes_per_s == 0 or self.replicate_bytes_per_s >= 1 << 20,
            "replicate_bytes_per_s",
            "must be at least 1 MiB, or 0 for no limit",
        )
        need(self.pacing in PACINGS, "pacing", f"must be one of {', '.join(PACINGS)}")
        need(self.repair_bytes_per_s >= 1 << 20, "repair_bytes_per_s", "must be at least 1 MiB")
        need(10 <= self.scrub_period_s <= 30 * 86400, "scrub_period_s", "must be from 10 s to 30 days")
        need(0 <= self.drain_on_stop_s <= 86400, "drain_on_stop_s", "must be from 0 to a day")
        for f in dataclasses.fields(self):
            if f.name.endswith("_s") and not f.name.endswith("_per_s") and f.name not in _OTHER_RANGES:
                need(0 < getattr(self, f.name) <= 3600, f.name, "must be above 0 and at most 3600 seconds")
        need(
            self.heartbeat_interval_s * 2 <= self.suspect_after_s,
            "suspect_after_s",
            "must be at least twice heartbeat_interval_s",
        )
        need(self.suspect_after_s <= self.down_after_s, "down_after_s", "must be at least suspect_after_s")
        need(
            self.heartbeat_interval_s * 2 <= self.lease_s <= self.down_after_s * 0.8,
            "lease_s",
            "must be at least twice heartbeat_interval_s and at most 0.8 of down_after_s",
        )
        self._check_certificates(need)
        self._check_tokens(need)
        self._check_watched(need)
        self._check_voters(need)

    def _check_watched(self, need: Any) -> None:
        for key in ("metrics_address", "health_address"):
            if address := getattr(self, key):
                try:
                    split_address(address)
                except ValueError as error:
                    raise ConfigError(f"config key {key!r}: {error}, and not empty") from None
        need(
            not self.health_address or self.health_address != self.metrics_address,
            "health_address",
            "must differ from metrics_address, which answers all of it too",
        )

    def _check_certificates(self, need: Any) -> None:
        tls = [self.tls_cert_file, self.tls_key_file, self.tls_ca_file]
        need(all(tls) or not any(tls), "tls_cert_file", "needs tls_key_file and tls_ca_file, or none of them")
        need(not self.lane_tls or all(tls), "lane_tls", "needs tls_cert_file, tls_key_file and tls_ca_file")
        if all(tls):
            self._check_names(need)

    def _check_tokens(self, need: Any) -> None:
        keys = ("token_jwks_file", "token_issuer", "token_audience")
        given = [bool(getattr(self, key)) for key in keys]
        need(
            all(given) or not any(given), "token_jwks_file", f"needs {keys[1]} and {keys[2]}, or none of them"
        )
        need(
            not any(given) or self.tls_cert_file is not None,
            "token_jwks_file",
            "needs tls_cert_file: without certificates every TCP port takes who comes with nothing",
        )
        for key in keys[1:]:
            text = getattr(self, key)
            fine = (
                len(text) <= TOKEN_WORD_CHARS_MAX
                and text.isascii()
                and text.isprintable()
                and " " not in text
            )
            need(fine, key, f"must be up to {TOKEN_WORD_CHARS_MAX} printable ASCII characters without blanks")

    def _check_names(self, need: Any) -> None:
        """A certificate has them as the name of a host, NODE_ID.CLUSTER_ID.fastcheck."""
        why = "with tls_cert_file it must be in lower case: names in certificates know no other"
        for key in ("cluster_id", "node_id"):
            need(getattr(self, key) == getattr(self, key).lower(), key, why)
        need("." not in self.cluster_id, "cluster_id", "with tls_cert_file it must have no dots")
        need(
            len(self.cluster_id) + len(self.node_id) <= 240,
            "node_id",
            "with cluster_id, is too long for a certificate",
        )

    def _check_voters(self, need: Any) -> None:
        need(len(self.voters) in {0, 1, 3, 5, 7}, "voters", "must be 1, 3, 5 or 7 nodes, or empty")
        ids = [v.node_id for v in self.voters]
        need(len(set(ids)) == len(ids), "voters", "names a node twice")
        addresses = [a for v in self.voters for a in (v.registry_address, v.raft_address)]
        for address in addresses:
            try:
                split_address(address)
            except ValueError as error:
                raise ConfigError(f"config key 'voters': {error}") from None
        need(len(set(addresses)) == len(addresses), "voters", "uses an address twice")
        exposed = [v for v in self.effective_voters if not is_loopback(split_address(v.raft_address)[0])]
        several = len(self.effective_voters) > 1
        safe = self.raft_key_file is not None or self.tls_cert_file is not None
        # Of voters only: nobody else needs to hold a secret.
        if self.own_voter is not None and (exposed or several) and not safe:
            raise ConfigError(
                "config key 'tls_cert_file' is missing: several voters, or one off loopback, need certificates "
                "(tls_cert_file, tls_key_file, tls_ca_file), or 'raft_key_file', a shared secret of at least 32 "
                "random bytes; make one with: head -c 32 /dev/urandom > raft.key && chmod 600 raft.key"
            )

    @property
    def exposed(self) -> list[str]:
        """The addresses of this node's ports that other machines may reach."""
        own = [self.agent_address, self.lane_address]
        if self.own_voter is not None:
            own += [self.own_voter.registry_address]
        return [address for address in own if not is_loopback(split_address(address)[0])]

    @property
    def effective_voters(self) -> tuple[Voter, ...]:
        """The voters; with none configured, this node alone, beside its other ports."""
        if self.voters:
            return self.voters
        base = max(self.agent_port, self.data_port, self.lane_port)
        return (
            Voter(
                node_id=self.node_id,
                registry_address=f"{self.host}:{base + 1}",
                raft_address=f"{self.host}:{base + 2}",
            ),
        )

    @property
    def own_voter(self) -> Voter | None:
        """This node's entry among the voters, if it is one."""
        return next((v for v in self.effective_voters if v.node_id == self.node_id), None)

    @property
    def agent_address(self) -> str:
        """host:port of this node's agent."""
        return f"{self.host}:{self.agent_port}"

    @property
    def data_address(self) -> str:
        """host:port of this node's data process."""
        return f"{self.host}:{self.data_port}"

    @property
    def lane_address(self) -> str:
        """host:port of this node's bulk lane; `lane_host` must be an address by now (`interfaces.with_lane_host`)."""
        host = self.effective_lane_host
        return f"[{host}]:{self.lane_port}" if self.lane_host and ":" in host else f"{host}:{self.lane_port}"

    @property
    def effective_lane_host(self) -> str:
        """What the lane listens on, and connects from."""
        return self.lane_host or self.host

    @property
    def agent_socket(self) -> Path:
        """Unix socket of the agent: what FASTCHECK_ADDRESS points to on this node."""
        return self.runtime_dir / "fastcheckd.sock"

    @property
    def registry_socket(self) -> Path:
        """Unix socket of the registry process, for its agent."""
        return self.runtime_dir / "registry.sock"

    @property
    def health_socket(self) -> Path:
        """Unix socket of gRPC's health service alone, behind the plaintext ports."""
        return self.runtime_dir / "health.sock"

    @property
    def data_socket(self) -> Path:
        """Unix socket of the data process; the agent tells trainers of it."""
        return self.runtime_dir / "data.sock"


def split_address(address: str) -> tuple[str, int]:
    """Split host:port; raises ValueError when it is not one."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def check_exposure(config: Config) -> None:
    """Refuse to serve other machines without certificates, unless told to.

    Raises:
        ConfigError: what is missing, and how to go on.
    """
    if config.exposed and config.tls_cert_file is None and not config.insecure:
        raise ConfigError(
            f"config key 'tls_cert_file' is missing: other machines can reach {', '.join(config.exposed)}, and without "
            "certificates whoever does can read, replace and delete every checkpoint. Set tls_cert_file, tls_key_file "
            "and tls_ca_file ('fastcheck certs' makes them for trying), or stay on loopback, or set insecure: true if "
            "only machines that you trust can reach this network"
        )


def is_loopback(host: str) -> bool:
    """Whether a bind address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
