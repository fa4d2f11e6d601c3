"""gRPC as every part of the daemon uses it: channel and server settings, and errors to and from the wire."""

from __future__ import annotations

import logging
import resource
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from fastcheck_proto.conventions import ERROR_METADATA_KEY, MESSAGE_BYTES_MAX
from fastcheck_proto.v1 import common_pb2 as pb

from .errors import FastCheckdError, PeerError, from_code

logger = logging.getLogger(__name__)

S = TypeVar("S")
Q = TypeVar("Q")
R = TypeVar("R")

#: From the first byte to the end of HTTP/2's greeting, TLS included; gRPC's own limit is two minutes. A machine whose
#: cores are all busy may take seconds.
HANDSHAKE_S_MAX = 10.0
#: Connections at one port: two processes of each of 4096 nodes, as many as a cluster has. Never more than a quarter of
#: the descriptors that the system lets the process have: the others are for segments, lanes and the log.
CONNECTIONS_MAX = 8192
#: A server that has not heard of a client for so long asks whether it is there, and then waits half as long: what a
#: machine that was cut off had asked for must not stay pinned for the two hours that TCP would take.
KEEPALIVE_S = 60.0

#: Nothing of ours compresses messages, and what inflates a thousandfold on the way in costs its sender nothing. Who
#: compresses one anyway is answered that it is none; turning the algorithms off would have gRPC log each.
_NO_INFLATING = ("grpc.per_message_decompression", 0)

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    _NO_INFLATING,
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A peer that comes back is found within a second instead of after minutes of backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Nothing of a pause: gRPC takes it for the deadline of a handshake, and a peer on busy cores needs its time.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Proxies from the environment are for the internet, not for the node beside us.
    ("grpc.enable_http_proxy", 0),
    # Every channel its own connections: a broken one is not shared with a fresh start.
    ("grpc.use_local_subchannel_pool", 1),
]
#: For a channel that lives for one question, whose own deadline ends it: above all no deadline of its own for a
#: connection, which is what the reconnect settings bring. A node that is merely busy would look dead.
ONE_CALL_OPTIONS: list[tuple[str, int]] = [o for o in CHANNEL_OPTIONS if "reconnect" not in o[0]]
#: Calls at once of one connection; more of them wait at the caller.
CALLS_MAX = 1024


def connections_max() -> int:
    """Connections that one port takes; gRPC closes the next one as soon as it is accepted."""
    # The soft limit is raised to the hard one when the process starts (`main`).
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return min(CONNECTIONS_MAX, descriptors // 4)


def server_options(
    message_bytes_max: int = MESSAGE_BYTES_MAX, *, calls_max: int = CALLS_MAX, keepalive: bool = True
) -> list[tuple[str, int]]:
    """Settings of a server, whose every limit is in docs/security.md, "Limits".

    Args:
        message_bytes_max: of a request; a larger one is RESOURCE_EXHAUSTED as soon as its size is announced.
        calls_max: at once, of one connection.
        keepalive: whether silent clients are asked if they live. Not those that map our memory: the kernel tells when
            one of this machine dies, and one that is only stopped must keep what it maps.
    """
    options = [
        _NO_INFLATING,
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        # Two daemons on one port must be an error, not a load balancer.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", calls_max),
        ("grpc.max_allowed_incoming_connections", connections_max()),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S_MAX * 1000)),
    ]
    if keepalive:
        options += [
            ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
            ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 500)),
        ]
    return options


_STATUS: dict[int, grpc.StatusCode] = {
    pb.ERROR_CODE_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_OVER_BUDGET: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_JOB_BUDGET: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_STORE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    pb.ERROR_CODE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_CORRUPT: grpc.StatusCode.DATA_LOSS,
    pb.ERROR_CODE_LOST: grpc.StatusCode.DATA_LOSS,
    pb.ERROR_CODE_FENCED: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_INCARNATION_OVER: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_SUPERSEDED: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_NO_QUORUM: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_CODE_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_CODE_NO_LEASE: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_CODE_UNSAFE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_REPLICAS_DISAGREE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_NOT_NEWER: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_WORLD_SIZE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_NO_PLACEMENT: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_HOLDER_LOST: grpc.StatusCode.FAILED_PRECONDITION,
}


def detail(error: FastCheckdError) -> pb.ErrorDetail:
    """The error as it travels inside a message."""
    return pb.ErrorDetail(code=error.code, message=str(error))


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    error: FastCheckdError,
    metadata: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    """End a call with an error of ours."""
    trailing = ((ERROR_METADATA_KEY, pb.ErrorCode.Name(error.code)), *metadata)
    await context.abort(_STATUS.get(error.code, grpc.StatusCode.INTERNAL), str(error), trailing)
    raise AssertionError("context.abort returned")


def answers(
    method: Callable[[S, Q, grpc.aio.ServicerContext[Q, R]], Awaitable[R]],
) -> Callable[[S, Q, grpc.aio.ServicerContext[Q, R]], Awaitable[R]]:
    """Decorate a unary servicer method: our errors become statuses, anything else a logged INTERNAL."""

    @wraps(method)
    async def wrapper(self: S, request: Q, context: grpc.aio.ServicerContext[Q, R]) -> R:
        try:
            return await method(self, request, context)
        except FastCheckdError as error:
            await abort(context, error)
        except grpc.aio.BaseError:
            # Ended by us, or the caller is gone: gRPC knows. To end it again would be an error of its own, and logged.
            raise
        except Exception as error:
            logger.exception("%s failed", method.__qualname__)
            await abort(context, FastCheckdError(f"internal error: {error!r}"))

    return wrapper


def from_rpc_error(error: grpc.RpcError, whom: str) -> FastCheckdError:
    """The error of ours that a failed call to `whom` stands for."""
    assert isinstance(error, grpc.aio.AioRpcError)
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and value in pb.ErrorCode.keys():  # noqa: SIM118  an enum wrapper, no dict
            return from_code(pb.ErrorCode.Value(str(value)), error.details() or str(value))
    return PeerError(f"{whom} did not answer: {error.code().name} {error.details()}")
