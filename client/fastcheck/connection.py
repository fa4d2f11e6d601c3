"""Ways to a daemon: its address, channels and links to it, and what its failures are called on this side.

The address names the agent's front door; `Describe` says where the data process listens. Every wait here is short:
deciding how long to keep trying is the callers' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from fastcheck_proto.conventions import ERROR_METADATA_KEY, MESSAGE_BYTES_MAX
from fastcheck_proto.v1 import common_pb2, node_pb2
from fastcheck_proto.v1.node_pb2_grpc import NodeServiceStub
from fastcheck_proto.v1.trainer_pb2_grpc import TrainerServiceStub

from . import security, tokens
from .errors import DaemonUnavailableError, FastCheckError, InvalidArgumentError, from_code

#: Length of a Unix socket's path that Linux can take.
_SOCKET_PATH_BYTES_MAX = 107
#: A live daemon shakes hands within this even on a machine whose cores are all taken.
_PROBE_S = 3.0
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Nothing of a pause: gRPC takes it for the deadline of a handshake.
    ("grpc.min_reconnect_backoff_ms", int(_PROBE_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Proxies from the environment are for the internet, not for the node beside us.
    ("grpc.enable_http_proxy", 0),
    # A link that was given up must not lend its broken connection to the next one.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class Address:
    """Where the agent is. `local`: on this machine, so bytes can go through shared memory."""

    target: str
    local: bool


def parse_address(text: str) -> Address:
    """Read `unix:///path/of/socket` or `host:port`.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//")
        if path.startswith("/") and len(path.encode()) <= _SOCKET_PATH_BYTES_MAX:
            return Address(f"unix:{path}", local=True)
    else:
        host, _, port = text.rpartition(":")
        if host and "/" not in host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535:
            return Address(text, local=False)
    raise InvalidArgumentError(
        f"address {text!r} is not one: use unix:///path/of/fastcheckd.sock (an absolute path of at most "
        f"{_SOCKET_PATH_BYTES_MAX} bytes) or host:port"
    )


@dataclass(frozen=True, eq=False)
class Link:
    """A channel to the data process."""

    target: str
    channel: grpc.Channel
    trainer: TrainerServiceStub


def connect(address: Address, timeout_s: float) -> Link:
    """Find the data process, within about `timeout_s`.

    Raises:
        DaemonUnavailableError: the agent or the data process does not answer.
    """
    what = address.target
    security.check_socket(what)
    with _channel(what) as channel:
        stub = NodeServiceStub(channel)
        try:
            node = stub.Describe(node_pb2.DescribeRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise translate(error, f"the daemon at {what}", security.hint(what)) from None
    target = f"unix:{node.data_socket}" if address.local and node.data_socket else node.data_address
    security.check_socket(target)
    shown = tokens.shown_to(target)
    made = _channel(target)
    try:
        grpc.channel_ready_future(made).result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        made.close()
        raise DaemonUnavailableError(
            f"the daemon at {what} answers, but its data process at {target} does not: it is restarting "
            "or hangs; see the daemon's log"
        ) from None
    return Link(target, made, TrainerServiceStub(grpc.intercept_channel(made, shown) if shown else made))


def is_alive(link: Link) -> bool:
    """Whether the data process still shakes hands; takes a moment when it does not."""
    with _channel(link.target) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_PROBE_S)
        except grpc.FutureTimeoutError:
            return False
        return True


def _channel(target: str) -> grpc.Channel:
    return security.open_channel(target, _OPTIONS)


def translate(error: grpc.RpcError, whom: str, hint: str = "") -> FastCheckError:
    """The error of ours that a failed call to `whom` stands for; `hint` ends the message when it cannot be reached."""
    assert isinstance(error, grpc.Call)
    code, sentence = error.code(), error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and value in common_pb2.ErrorCode.keys():  # noqa: SIM118  an enum wrapper
            return from_code(common_pb2.ErrorCode.Value(str(value)), sentence or str(value))
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return FastCheckError(f"{whom} does not know this call: it runs another version of FastCheck")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonUnavailableError(f"{whom} did not answer in time: it hangs or is overloaded")
    return DaemonUnavailableError(
        f"{whom} cannot be reached ({code.name}: {sentence}). Is fastcheckd running on this node, and does "
        f"FASTCHECK_ADDRESS point to its socket?{hint}"
    )
