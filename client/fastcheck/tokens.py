"""Bearer tokens that identify a trainer in each call (docs/security.md).

The issuer renews the token in its file while training goes on, as the kubelet does, so the file is read for each call.
Until it expires a token is as good as a password: it is sent only through a Unix socket or TLS, and is in no message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from fastcheck_proto.conventions import TOKEN_BYTES_MAX, TOKEN_METADATA_KEY, check_token

from .errors import InvalidArgumentError
from .security import VARIABLES, Certificate

#: Names the file. Unset or empty: no token is shown.
FILE_VARIABLE = "FASTCHECK_TOKEN_FILE"


def shown_to(target: str, environment: Mapping[str, str] | None = None) -> TokenShower | None:
    """An interceptor that adds the token to calls to that target; None without a token file.

    Raises:
        InvalidArgumentError: the file has none, or it would go over plaintext.
    """
    env = os.environ if environment is None else environment
    text = env.get(FILE_VARIABLE, "")
    if not text:
        return None
    if not target.startswith("unix:") and Certificate.from_environment(environment) is None:
        raise InvalidArgumentError(
            f"{FILE_VARIABLE} is set, and {target} would get the token over plaintext, where others can read it: set "
            f"{', '.join(VARIABLES)}, use the daemon's Unix socket, or unset {FILE_VARIABLE}"
        )
    shower = TokenShower(Path(text))
    shower.token()  # a bad file is reported before a connection is made
    return shower


class _Details(NamedTuple):
    """`grpc.ClientCallDetails`, which is only described there."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class TokenShower(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the present token to every call, for the kinds of calls that TrainerService has."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def token(self) -> str:
        """The present content of the file.

        Raises:
            InvalidArgumentError: it cannot be read, or has no token. The message has nothing of its content.
        """
        try:
            with self._path.open("rb") as file:
                data = file.read(TOKEN_BYTES_MAX + 2)  # a line's end may follow
        except OSError as error:
            raise InvalidArgumentError(
                f"cannot read {FILE_VARIABLE}={self._path}: {error.strerror}"
            ) from None
        try:
            return check_token(data.decode("ascii").strip())
        except UnicodeDecodeError:
            why = "it is no ASCII text"
        except ValueError as error:
            why = str(error)
        raise InvalidArgumentError(f"{FILE_VARIABLE}={self._path} has no token: {why}")

    def _show(self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any) -> Any:
        details = client_call_details
        shown = (TOKEN_METADATA_KEY, f"Bearer {self.token()}")
        return continuation(
            _Details(
                details.method, details.timeout, (*(details.metadata or ()), shown), details.credentials,
                details.wait_for_ready, details.compression,
            ),
            request,
        )  # fmt: skip

    intercept_unary_unary = intercept_unary_stream = _show
    # gRPC passes the third argument by position, whatever its name.
    intercept_stream_unary = intercept_stream_stream = _show  # type: ignore[assignment]
