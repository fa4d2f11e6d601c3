"""How large a request may be: on the wire, and in what it holds once it is parsed. Pure.

An element of a protobuf message takes two bytes on the wire and up to a hundred in memory, and parsing is done in one
piece: whoever may send megabytes of empty elements takes fifty times as much memory. So a request is measured before it
is parsed and counted before anything waits with it; what stays in memory meanwhile is charged to its caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fastcheck_proto.conventions import REQUEST_BYTES_MAX, STREAM_PIECE_BYTES
from fastcheck_proto.v1 import layout_pb2
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import InvalidRequestError, OverBudgetError
from . import roles

#: Requests that trainers and operators make hold names and numbers, but for those below.
SMALL_BYTES_MAX = 64 << 10
#: Pieces of state that a sender may choose; ours are smaller. And of a message with one.
PIECE_BYTES_MAX = 4 * STREAM_PIECE_BYTES
UPLOAD_BYTES_MAX = PIECE_BYTES_MAX + 1024
#: Chunks of 4 MiB of a state of 1 TiB, four runs in each, and the hyper-parameters of each of many parameter groups.
CHUNKS_MAX = 1 << 18
RUNS_MAX = 1 << 20
OPTIMIZER_STEPS_MAX = 1 << 14
#: One for each rank that takes part.
PARTS_MAX = 1 << 16
RANGES_MAX = 1 << 18
#: Large requests of one caller that are being answered, on the wire: the layouts of sixty ranks with 100 GB each.
CALLER_BYTES_MAX = 128 << 20

_TRAINER = "/fastcheck.v1.TrainerService/"

_Counts = Iterator[tuple[str, int, int]]


def bytes_max(method: str) -> int | None:
    """Of a request of that method; None: as much as its port takes, since only nodes make it."""
    if method in _COUNTED:
        return REQUEST_BYTES_MAX
    if method == f"{_TRAINER}Upload":
        return UPLOAD_BYTES_MAX
    return SMALL_BYTES_MAX if roles.is_for_others_than_nodes(method) else None


def check_bytes(method: str, size: int) -> None:
    """Raise InvalidRequestError for a request that is too large to be parsed."""
    if (most := bytes_max(method)) is not None and size > most:
        raise InvalidRequestError(f"a request of {method} has at most {most} bytes, this one {size}")


def too_many(method: str, request: Any) -> str:
    """What of a request are more elements than any that means something; empty: nothing.

    Not an error: whoever catches one keeps the request in memory by its traceback.
    """
    return _first_excess(_COUNTED.get(method, _nothing)(request))


def too_many_of_a_seal(sealed: tpb.Sealed) -> str:
    """The same of a seal that came another way."""
    return _first_excess(_seal(sealed))


def _first_excess(counts: _Counts) -> str:
    for what, found, most in counts:
        if found > most:
            return f"{found} {what} are more than {most}"
    return ""


class InHand:
    """Bytes of large requests that are being answered, by who made them. Used on one event loop."""

    def __init__(self) -> None:
        self._bytes: Counter[roles.Caller] = Counter()

    def take(self, who: roles.Caller, size: int) -> int:
        """Charge a request to its caller; returns what `give` takes back.

        Raises:
            OverBudgetError: so many of this caller's are being answered already.
        """
        # Local callers are this machine's own user, whose ranks may all be on it.
        if size <= SMALL_BYTES_MAX or who.role not in {roles.TRAINER, roles.BEARER, roles.ADMIN}:
            return 0
        if self._bytes[who] + size > CALLER_BYTES_MAX:
            raise OverBudgetError(
                f"large requests of {who} with {self._bytes[who]} bytes are being answered, and {CALLER_BYTES_MAX} is "
                "the most of one caller: wait for their answers, or spread the ranks over more nodes"
            )
        self._bytes[who] += size
        return size

    def give(self, who: roles.Caller, taken: int) -> None:
        """The request is answered."""
        self._bytes[who] -= taken
        if self._bytes[who] <= 0:
            del self._bytes[who]


def _nothing(_request: Any) -> _Counts:
    yield from ()


def _layout(layout: layout_pb2.StateLayout) -> _Counts:
    yield "chunks of a layout", len(layout.chunks), CHUNKS_MAX
    yield "optimizer steps of a layout", len(layout.optimizer_steps), OPTIMIZER_STEPS_MAX
    # Their number has been looked at before they are visited.
    yield "runs of a layout", sum(len(chunk.runs) for chunk in layout.chunks), RUNS_MAX


def _seal(sealed: tpb.Sealed) -> _Counts:
    yield "digests of parts", len(sealed.shared_digests), PARTS_MAX
    yield from _layout(sealed.layout)


def _session(message: tpb.TrainerMessage) -> _Counts:
    yield from _seal(message.sealed)


def _read(request: tpb.ReadRequest) -> _Counts:
    yield "ranks", len(request.ranks), PARTS_MAX
    yield "ranges", sum(len(rank.ranges) for rank in request.ranks), RANGES_MAX


_COUNTED: dict[str, Callable[[Any], _Counts]] = {
    f"{_TRAINER}Session": _session,
    f"{_TRAINER}Read": _read,
}
