"""Who this process is to a daemon on another machine: certificates from files, read anew for each channel.

A Unix socket needs none: who may enter its directory may speak. For `host:port` the daemon shows a certificate that is
good for that host, and wants one of this process' own (docs/security.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from .errors import InvalidArgumentError

#: The variables, in the order of `Certificate`'s fields.
VARIABLES = ("FASTCHECK_TLS_CERT", "FASTCHECK_TLS_KEY", "FASTCHECK_TLS_CA")
SERVER_NAME = "FASTCHECK_TLS_SERVER_NAME"
#: Chains are a few KiB; anything larger is another file.
_FILE_BYTES_MAX = 1 << 20

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True)
class Certificate:
    """PEM files: this process' certificate, its key, the authority of the daemons' certificates."""

    cert: Path
    key: Path
    ca: Path
    #: What the daemon's certificate must name; empty: the host of the address.
    server_name: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Certificate | None:
        """What FASTCHECK_TLS_CERT, _KEY and _CA name; None when none of them is set.

        Raises:
            InvalidArgumentError: only some of them are set.
        """
        env = os.environ if environment is None else environment
        texts = [env.get(name, "") for name in VARIABLES]
        if not any(texts):
            return None
        if not all(texts):
            missing = ", ".join(name for name, text in zip(VARIABLES, texts, strict=True) if not text)
            raise InvalidArgumentError(
                f"{missing} must be set too: a certificate needs its key and its authority"
            )
        cert, key, ca = map(Path, texts)
        return cls(cert, key, ca, server_name=env.get(SERVER_NAME, ""))

    def credentials(self) -> grpc.ChannelCredentials:
        """What is in the files now.

        Raises:
            InvalidArgumentError: one cannot be read.
        """
        cert, key, ca = map(_read, (self.cert, self.key, self.ca))
        return grpc.ssl_channel_credentials(ca, key, cert)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the TLS file {path}: {error.strerror}") from None
    if len(data) > _FILE_BYTES_MAX:
        raise InvalidArgumentError(f"the TLS file {path} has more than {_FILE_BYTES_MAX} bytes: it is none")
    return data


def open_channel(target: str, options: Options) -> grpc.Channel:
    """A channel to a daemon: plaintext through a Unix socket, under TLS elsewhere if there is a certificate.

    Raises:
        InvalidArgumentError: the certificate that the environment names cannot be used.
    """
    certificate = None if target.startswith("unix:") else Certificate.from_environment()
    if certificate is None:
        return grpc.insecure_channel(target, options=options)
    named = [("grpc.ssl_target_name_override", certificate.server_name)] if certificate.server_name else []
    return grpc.secure_channel(target, certificate.credentials(), options=[*options, *named])


def hint(target: str) -> str:
    """What else may be wrong when a daemon at that address does not answer: a sentence to add."""
    if target.startswith("unix:"):
        return ""
    if Certificate.from_environment() is None:
        return f" If it wants TLS, set {', '.join(VARIABLES)}."
    return (
        " Under TLS: is this certificate of the daemon's authority and still valid, and is the daemon's good for that "
        f"host, or for the name in {SERVER_NAME}?"
    )
