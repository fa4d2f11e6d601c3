"""A small certificate authority in a folder, for trying: the certificates that docs/security.md describes.

DIR/
  ca.pem, ca.key                   the authority; its key belongs nowhere else
  node-NODE.pem, .key              for `tls_cert_file` and `tls_key_file` of that node
  admin-NAME.pem, .key             for an operator
  trainer-NAME.pem, .key           for trainers on machines without a daemon

Keys are 0600 and without a password, nothing is ever overwritten. A cluster that matters has an authority elsewhere
(SPIRE, cert-manager, Vault), which renews what it signs.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcheck_proto.conventions import check_name

from .errors import FastCheckError, InvalidArgumentError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

#: Clocks differ.
_EARLY = datetime.timedelta(minutes=5)
_DOMAIN = "spiffe://"
#: Longest host name in a certificate.
_HOST_CHARS_MAX = 253


class LocalAuthority:
    """The authority in a folder.

    Args:
        folder: with ca.pem and ca.key, as `create` made them.

    Raises:
        InvalidArgumentError: there is none, or it cannot be read.
        FastCheckError: the package `cryptography` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        lib = _library()
        self.folder = folder
        try:
            self._ca = lib.x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = lib.serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"{folder} holds no authority that can be used ({error}); make one with: "
                f"fastcheck certs init CLUSTER --dir {folder}"
            ) from None
        self._key: ec.EllipticCurvePrivateKey = key
        names = self._ca.extensions.get_extension_for_class(lib.x509.SubjectAlternativeName).value
        (self.cluster_id,) = (
            uri.removeprefix(_DOMAIN) for uri in names.get_values_for_type(lib.x509.UniformResourceIdentifier)
        )

    @classmethod
    def create(cls, folder: Path, cluster_id: str, *, days: int = 3650) -> LocalAuthority:
        """Make an authority for a cluster.

        Raises:
            InvalidArgumentError: there is one already, or the cluster's id is none.
            FastCheckError: the package `cryptography` is not installed.
        """
        lib = _library()
        _check("cluster", cluster_id)
        if "." in cluster_id or cluster_id != cluster_id.lower():
            raise InvalidArgumentError(f"cluster {cluster_id!r} must be in lower case and have no dots")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = lib.ec.generate_private_key(lib.ec.SECP256R1())
        name = lib.x509.Name([lib.x509.NameAttribute(lib.oid.COMMON_NAME, "fastcheck, for trying")])
        domain = lib.x509.UniformResourceIdentifier(_DOMAIN + cluster_id)
        certificate = (
            _builder(lib, name, name, key.public_key(), days)
            .add_extension(lib.x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(lib.x509.SubjectAlternativeName([domain]), critical=False)
            .add_extension(lib.x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, lib.hashes.SHA256())
        )
        _write(lib, folder / "ca", certificate, key)
        return cls(folder)

    def node(self, node_id: str, hosts: Sequence[str] = (), *, days: int = 365) -> Path:
        """A node's certificate; its key lies beside it as .key.

        Args:
            hosts: addresses and names under which trainers and operators reach it.
        """
        if node_id != node_id.lower():
            raise InvalidArgumentError(f"node {node_id!r} must be in lower case")
        return self._issue("node", node_id, [f"{node_id}.{self.cluster_id}.fastcheck", *hosts], days)

    def admin(self, name: str, *, days: int = 365) -> Path:
        """An operator's certificate."""
        return self._issue("admin", name, [], days)

    def trainer(self, name: str, *, days: int = 365) -> Path:
        """A certificate for trainers, who own their jobs under that name."""
        return self._issue("trainer", name, [], days)

    def _issue(self, role: str, name: str, hosts: Sequence[str], days: int) -> Path:
        lib = _library()
        _check(role, name)
        key = lib.ec.generate_private_key(lib.ec.SECP256R1())
        uri = f"{_DOMAIN}{self.cluster_id}/fastcheck/{role}/{name}"
        names = [lib.x509.UniformResourceIdentifier(uri), *(_host(lib, host) for host in hosts)]
        subject = lib.x509.Name([lib.x509.NameAttribute(lib.oid.COMMON_NAME, f"{role} {name}"[:64])])
        issuer = lib.x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(lib, subject, self._ca.subject, key.public_key(), days)
            .add_extension(lib.x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, lib.hashes.SHA256())
        )
        return _write(lib, self.folder / f"{role}-{name}", certificate, key)


class _Library:
    """Of `cryptography`, what is used here."""

    def __init__(self) -> None:
        from cryptography import x509  # noqa: PLC0415  an extra, needed here alone
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import NameOID  # noqa: PLC0415

        self.x509, self.hashes, self.serialization, self.ec, self.oid = (
            x509,
            hashes,
            serialization,
            ec,
            NameOID,
        )


def _library() -> Any:
    try:
        return _Library()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise FastCheckError(
            "making certificates needs the package cryptography; run: pip install 'fastcheck[certs]'"
        ) from None


def _builder(
    lib: Any, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    return (
        lib.x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(lib.x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host(lib: Any, host: str) -> Any:
    try:
        return lib.x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host.isascii() or not 1 <= len(host) <= _HOST_CHARS_MAX or " " in host:
            raise InvalidArgumentError(f"{host!r} is neither an IP address nor the name of a host") from None
        return lib.x509.DNSName(host)


def _check(what: str, name: str) -> None:
    try:
        check_name(what, name)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def _write(lib: Any, stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Path:
    """STEM.key and STEM.pem, the key first: where there is a certificate, there is its key."""
    pem = lib.serialization.Encoding.PEM
    private = key.private_bytes(pem, lib.serialization.PrivateFormat.PKCS8, lib.serialization.NoEncryption())
    files = [(stem.parent / f"{stem.name}.key", private, 0o600)]
    files += [(stem.parent / f"{stem.name}.pem", certificate.public_bytes(pem), 0o644)]
    for path, _, _ in files:
        if path.exists():
            raise InvalidArgumentError(f"{path} exists and is not overwritten; move it away first")
    for path, data, mode in files:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            raise InvalidArgumentError(f"cannot write {path}: {error.strerror}") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    return files[1][0]
