"""Channels to daemons: certificates from files, read again for each channel, and the owner of a Unix socket.

A Unix socket needs no certificate: access to its directory is the permission, and `check_socket` verifies its owner.
For `host:port` the daemon shows a certificate for that host, and wants one of this process (docs/security.md).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from fastcheck_proto.conventions import default_runtime_dir

from .errors import DaemonUnavailableError, InvalidArgumentError

#: The variables, in the order of `Certificate`'s fields.
VARIABLES = ("FASTCHECK_TLS_CERT", "FASTCHECK_TLS_KEY", "FASTCHECK_TLS_CA")
SERVER_NAME = "FASTCHECK_TLS_SERVER_NAME"
#: By others than its owner.
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
#: Longest wait for a socket to accept; if it does not, connecting will report that.
_PEER_S = 1.0
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
        """The files of FASTCHECK_TLS_CERT, _KEY and _CA; None when none of them is set.

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
        """Credentials from the present content of the files.

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


def check_socket(target: str) -> None:
    """Check that a Unix socket belongs to this user's daemon or to a service, not to another user.

    The default address of a user who is not root may lie below a folder in which everybody may make files, before any
    daemon is there. Other targets, and missing sockets, pass: connecting will report them.

    Raises:
        DaemonUnavailableError: another user of this machine answers there, or may have put the socket there.
    """
    if not target.startswith("unix:"):
        return
    path = Path(target.removeprefix("unix:").removeprefix("//"))
    trusted = {0, os.geteuid()}
    try:
        folder, above = path.parent.stat(), path.parent.parent.stat()
        answers = _peer_uid(path)
    except OSError:
        return
    # Somebody has named this folder here, or nobody but its maker could have made it.
    chosen = path.parent != default_runtime_dir() or not above.st_mode & _WRITABLE
    if chosen and not folder.st_mode & _WRITABLE:
        trusted.add(folder.st_uid)
    if answers not in trusted:
        raise DaemonUnavailableError(
            f"user {answers} answers at {path}, who is neither root nor the user of this process ({os.geteuid()}), and "
            "may have put it there: nothing was said to it. Set FASTCHECK_ADDRESS to your daemon's socket, in a folder "
            "that only the daemon's user may write to"
        )


def _peer_uid(path: Path) -> int:
    """The user that listens at a socket, from the kernel."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_PEER_S)
        sock.connect(str(path))
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def hint(target: str) -> str:
    """A sentence to add to the error when a daemon does not answer: a possible cause in the TLS settings."""
    if target.startswith("unix:"):
        return ""
    if Certificate.from_environment() is None:
        return f" If it wants TLS, set {', '.join(VARIABLES)}."
    return (
        " Under TLS: is this certificate of the daemon's authority and still valid, and is the daemon's good for that "
        f"host, or for the name in {SERVER_NAME}?"
    )
