"""gRPC as every part of the daemon uses it: channel and server settings, and errors to and from the wire."""

from __future__ import annotations

import logging
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

_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    # A peer that comes back is found within a second instead of after minutes of backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Proxies from the environment are for the internet, not for the node beside us.
    ("grpc.enable_http_proxy", 0),
    # Every channel its own connections: a broken one is not shared with a fresh start.
    ("grpc.use_local_subchannel_pool", 1),
]
#: For a channel that lives for one question, whose own deadline ends it: above all no 100 ms for a connection, which
#: is what the reconnect settings allow. A node that is merely busy would look dead.
ONE_CALL_OPTIONS: list[tuple[str, int]] = [o for o in CHANNEL_OPTIONS if "reconnect" not in o[0]]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    # Two daemons on one port must be an error, not a load balancer.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 1024),
]

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
        except grpc.aio.AbortError:
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
