"""Nodes' certificates: mutual TLS 1.3, in which who speaks is who a certificate says, and nobody else can read it.

A node's certificate names it in its SAN with one URI, `spiffe://CLUSTER/fastcheck/node/NODE`, and with the host name
`NODE.CLUSTER.fastcheck`, which is all that gRPC compares when it connects; the same authority signs all of them. Voters
use them among themselves, data processes for the bulk lane, and everybody for gRPC (`dialer.py`). What a node may do
once its name is known is decided where it speaks.
"""

from __future__ import annotations

import dataclasses
import logging
import ssl
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from .config import Config
from .errors import ConfigError

logger = logging.getLogger(__name__)

_OURS = "spiffe://"


def node_uri(cluster_id: str, node_id: str) -> str:
    """The name of a node in its certificate."""
    return f"spiffe://{cluster_id}/fastcheck/node/{node_id}"


def node_dns(cluster_id: str, node_id: str) -> str:
    """The name under which gRPC looks for a node in its certificate. Not in the DNS."""
    return f"{node_id}.{cluster_id}.fastcheck"


def named_node(certificate: Any, cluster_id: str) -> str | None:
    """The node that a verified certificate (as `getpeercert` gives it) names; None when it names none.

    One name only: a certificate of several nodes would let one of them speak as another.
    """
    names = (certificate or {}).get("subjectAltName", ())
    uris = [value for kind, value in names if kind == "URI" and value.startswith(_OURS)]
    prefix = node_uri(cluster_id, "")
    if len(uris) != 1 or not uris[0].startswith(prefix):
        return None
    return str(uris[0][len(prefix) :]) or None


@dataclass(frozen=True)
class _Contexts:
    accepting: ssl.SSLContext
    connecting: ssl.SSLContext


@dataclass(frozen=True, eq=False)
class Files:
    """What was in the three files when they last passed."""

    cert: bytes
    key: bytes
    ca: bytes
    #: Unix seconds between which the certificate is valid.
    not_before_s: float
    not_after_s: float
    #: Counts the changes.
    generation: int = 0

    @property
    def seconds_left(self) -> int:
        """Until it is not valid any more; negative: since."""
        return int(self.not_after_s - time.time())

    @property
    def lifetime_s(self) -> int:
        """From its first second to its last."""
        return max(0, int(self.not_after_s - self.not_before_s))

    def for_servers(self) -> grpc.ServerCertificateConfiguration:
        """As gRPC's servers take it."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


class Certificates:
    """This node's certificate, read again when its files change; a new connection takes the newest that is good.

    Args:
        config: with all three `tls_*` keys.

    Raises:
        ConfigError: a file that the operator has to look at.
    """

    def __init__(self, config: Config) -> None:
        assert config.tls_cert_file and config.tls_key_file and config.tls_ca_file
        self._cert, self._key, self._ca = config.tls_cert_file, config.tls_key_file, config.tls_ca_file
        self.cluster_id = config.cluster_id
        self._own_uri = node_uri(config.cluster_id, config.node_id)
        self._node_id = config.node_id
        # gRPC asks from threads of its own.
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._contexts, self.newest = self._load()

    def context(self, *, accepting: bool) -> ssl.SSLContext:
        """For one new connection."""
        self.refresh()
        return self._contexts.accepting if accepting else self._contexts.connecting

    def ends_at_s(self) -> float:
        """When the certificate in use expires, Unix seconds."""
        self.refresh()
        return self.newest.not_after_s

    def _signature(self) -> Signature:
        return signature(self._cert, self._key, self._ca)

    def refresh(self) -> None:
        """Look whether the files have changed, and take them if they are good."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            contexts, files = self._load()
            if self._signature() != seen:
                raise ConfigError("they change at this moment")
        except ConfigError as error:
            # Between the first and the last file of a rotation, for example: each change is looked at.
            logger.warning("the changed TLS files are not used: %s", error)
        else:
            self._contexts = contexts
            self.newest = dataclasses.replace(files, generation=self.newest.generation + 1)
            logger.info("the TLS files have changed; new connections use them")

    def _load(self) -> tuple[_Contexts, Files]:
        for key, path in (
            ("tls_cert_file", self._cert),
            ("tls_key_file", self._key),
            ("tls_ca_file", self._ca),
        ):
            _check_readable(key, path)
        cert, key_bytes, ca = (path.read_bytes() for path in (self._cert, self._key, self._ca))
        if self._key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"config key 'tls_key_file': others may read {self._key}; run: chmod 600 {self._key}"
            )
        contexts = _Contexts(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))
        try:
            certificate = _shake_hands_with_oneself(contexts)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"config key 'tls_cert_file': {self._cert} does not pass: {error.verify_message}. It must be valid "
                f"now, signed by the authority in {self._ca} (tls_ca_file), and fit for clients and servers"
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(
                f"config key 'tls_cert_file': TLS 1.3 does not work with {self._cert}: {error.reason or error}"
            ) from None
        if named_node(certificate, self.cluster_id) != self._node_id:
            raise ConfigError(
                f"config key 'tls_cert_file': {self._cert} must name this node, and no other, in its SAN: one URI, "
                f"{self._own_uri}; make a certificate with it, or check cluster_id and node_id"
            )
        dns = node_dns(self.cluster_id, self._node_id)
        if ("DNS", dns) not in certificate["subjectAltName"]:
            raise ConfigError(
                f"config key 'tls_cert_file': {self._cert} must also name this node as the host {dns} in its SAN, "
                "which is what gRPC looks for; make a certificate with both names"
            )
        valid = [ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter")]
        return contexts, Files(cert, key_bytes, ca, *valid)

    def _context(self, protocol: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # nodes have names of their own, see `named_node`
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cafile=self._ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"config key 'tls_ca_file': {self._ca} holds no PEM certificate ({error.reason or error})"
            ) from None
        try:
            context.load_cert_chain(self._cert, self._key, password=lambda: "")
        except ssl.SSLError as error:
            raise ConfigError(
                f"config key 'tls_key_file': {self._key} is not the key of {self._cert} "
                f"({error.reason or error}); both must be PEM, the key without a password"
            ) from None
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # every connection shows its certificate anew
        return context


def _check_readable(key: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"config key '{key}': cannot read {path}: {error.strerror}") from None


def _shake_hands_with_oneself(contexts: _Contexts) -> Any:
    """Both ends of a connection with the own certificate: what would fail later, fails here."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        contexts.connecting.wrap_bio(to_client, to_server, server_side=False),
        contexts.accepting.wrap_bio(to_server, to_client, server_side=True),
    ]
    open_ends = list(ends)
    for _ in range(8):  # TLS 1.3 needs two turns
        for end in list(open_ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            open_ends.remove(end)
        if not open_ends:
            return ends[0].getpeercert()
    raise ssl.SSLError("the handshake did not end")


def reason(error: ssl.SSLError) -> str:
    """Why a handshake or a connection failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not pass: {error.verify_message}"
    return f"TLS: {error.reason or error}"


Signature = tuple[tuple[int, ...] | None, ...]


def signature(*paths: Path) -> Signature:
    """Differs from an earlier one as soon as one of the files is another one, or there no more; reads none of them."""
    return tuple(_of(path) for path in paths)


def _of(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
