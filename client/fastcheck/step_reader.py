"""Reads parts of any ranks' states of a committed step, for resharding and torch.distributed.checkpoint.

A reader first gets all ranks' headers, then asks for byte ranges, as often as it likes (docs/reading.md). It takes
nobody's place in the job, so any process may read while the job trains. `state/records.py` knows which bytes a part of
a tensor is, and how they get into a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from fastcheck_proto.conventions import HEADER_BYTES_MAX, TENSOR_ALIGNMENT_BYTES
from fastcheck_proto.v1 import state_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb

from .daemon import PATIENT_CONNECT_S, Daemon
from .errors import (
    CorruptError,
    FastCheckError,
    InvalidArgumentError,
    LoadFailedError,
    OutOfMemoryError,
    SaveFailedError,
    StepNotFoundError,
)
from .progress import Reporter
from .saved_rank import SavedRank, saved_ranks
from .segments import MappedSegment, anonymous, map_file
from .state.records import ByteRange, read_box

#: Long enough for a large state over a slow network; a daemon that hangs is noticed long before.
_READ_S = 3600.0


@dataclass(frozen=True, eq=False)
class BoxInto:
    """A box of a tensor that a rank saved, and the tensor that it goes into: see `read_box`."""

    rank: int
    record: state_pb2.TensorRecord
    offsets: Sequence[int]
    sizes: Sequence[int]
    target: torch.Tensor


class StepReader:
    """One committed step of a job, to be read in parts. A context manager; entering it reads all ranks' headers.

    Args:
        daemon: on this machine, or elsewhere: then the bytes go through a stream.
        step: unless given, the newest committed one.
        timeout_s: Longest that one read may take, and be looked at.

    Use from one thread at a time. `step`, `world_size`, `lossy` and `ranks` are known once entered.

    Raises, when entered and on reading:
        StepNotFoundError: the step is not kept, or none is committed.
        LostError, CorruptError, OutOfMemoryError, DaemonUnavailableError, RegistryUnavailableError: as a load.
    """

    def __init__(
        self, daemon: Daemon, job: str, step: int | None = None, *, timeout_s: float = _READ_S
    ) -> None:
        self._daemon = daemon
        self.job = job
        self._wanted_step = step
        self._timeout_s = timeout_s
        self.step = -1
        self.world_size = 0
        #: Whether some rank's trainer allowed a lossy coding.
        self.lossy = False
        self.ranks: Mapping[int, SavedRank] = {}
        #: Totals of all reads so far. Bytes are those of whole chunks; `holders` is the largest number of nodes that
        #: served one read.
        self.stats = {
            "reads": 0,
            "local_bytes": 0,
            "fetched_bytes": 0,
            "holders": 0,
            "bad_copies": 0,
            "read_s": 0.0,
        }

    def __enter__(self) -> StepReader:
        request = pb.ReadRequest(job=self.job, step=self._wanted_step, by_stream=not self._daemon.local)
        with self._opened(request) as (ready, states):
            headers = {
                rank.rank: _bytes(states[rank.rank], ByteRange(rank.header_offset, rank.header_bytes))
                for rank in ready.ranks
            }
            if sorted(headers) != list(range(ready.world_size)):
                raise CorruptError(
                    f"the daemon gave headers of {len(headers)} of {ready.world_size} ranks of step {ready.step}"
                )
            self.step, self.world_size, self.lossy = ready.step, ready.world_size, ready.lossy
            self.ranks = saved_ranks(ready, headers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is kept between reads."""

    @contextmanager
    def read(
        self, wants: Mapping[int, Sequence[tuple[int, int]]], reporter: Reporter | None = None
    ) -> Iterator[Mapping[int, torch.Tensor]]:
        """Those byte ranges, each (offset, bytes), of those ranks' states, valid inside the block.

        Each rank's state is a flat uint8 tensor of `state_bytes`, read-only: the requested ranges are in their places,
        and the rest is undefined. Ranges may come in any order and overlap. `reporter` is told the progress, in bytes
        of the chunks that are fetched.

        Raises:
            InvalidArgumentError: there is no such rank, or a range lies outside of its state.
            What the class says.
        """
        request = pb.ReadRequest(job=self.job, step=self.step, by_stream=not self._daemon.local)
        for rank in sorted(wants):
            if rank not in self.ranks:
                raise InvalidArgumentError(f"step {self.step} of job {self.job!r} has no rank {rank}")
            ranges = merged(wants[rank], self.ranks[rank].state_bytes)
            request.ranks.add(rank=rank).ranges.extend(
                pb.ByteRange(offset=each.offset, bytes=each.bytes) for each in ranges
            )
        if not request.ranks:
            if reporter is not None:
                reporter.all_here(0, 0)
            yield {}
            return
        with self._opened(request, reporter) as (_, states):
            yield states

    def fill(self, boxes: Sequence[BoxInto], reporter: Reporter | None = None) -> None:
        """Read all these boxes at once and copy each into its tensor, also from a shared state.

        `reporter` as for `read`.

        Raises:
            InvalidArgumentError: a box does not lie in its tensor, or does not fit its target.
            What the class says; targets may be filled in part then.
        """
        plans = [read_box(box.record, box.offsets, box.sizes) for box in boxes]
        wants: dict[int, list[ByteRange]] = {}
        for box, plan in zip(boxes, plans, strict=True):
            if box.rank not in self.ranks:
                raise InvalidArgumentError(f"step {self.step} of job {self.job!r} has no rank {box.rank}")
            for rank, ranges in self.ranks[box.rank].locate(plan.ranges).items():
                wants.setdefault(rank, []).extend(ranges)
        with self.read(wants, reporter) as states:
            for box, plan in zip(boxes, plans, strict=True):
                plan.assemble(box.target, self.ranks[box.rank].bytes_in(states))

    @contextmanager
    def _opened(
        self, request: pb.ReadRequest, reporter: Reporter | None = None
    ) -> Iterator[tuple[pb.ReadReady, Mapping[int, torch.Tensor]]]:
        states: dict[int, torch.Tensor] = {}
        segment: MappedSegment | None = None
        try:
            with self._daemon.errors(PATIENT_CONNECT_S) as link:
                # The segment stays put for as long as this stream is open.
                stream = link.trainer.Read(request, timeout=self._timeout_s)
                try:
                    with self._daemon.guarded(link, stream):
                        ready = _ready(stream, request, reporter)
                        segment = _received(stream, request, ready) if request.by_stream else None
                except BaseException:
                    stream.cancel()
                    raise
        except SaveFailedError as error:
            # Codes about peers are the same in both directions.
            raise LoadFailedError(str(error)) from None
        try:
            if segment is None:
                segment = map_file(ready.segment, private=True)
            self._note(ready)
            if reporter is not None:
                reporter.all_here(ready.local_bytes + ready.fetched_bytes, ready.holders)
            for rank in ready.ranks:
                states[rank.rank] = segment.tensor[rank.offset : rank.offset + rank.state_bytes]
            yield ready, states
        finally:
            # A view that outlives this block keeps its pages: the daemon only removes the file, and never reuses them.
            states.clear()
            segment = None
            stream.cancel()

    def _note(self, ready: pb.ReadReady) -> None:
        self.stats["reads"] += 1
        self.stats["local_bytes"] += ready.local_bytes
        self.stats["fetched_bytes"] += ready.fetched_bytes
        self.stats["holders"] = max(self.stats["holders"], ready.holders)
        self.stats["bad_copies"] += ready.bad_copies
        self.stats["read_s"] += ready.read_s


def merged(ranges: Sequence[tuple[int, int]], state_bytes: int) -> list[ByteRange]:
    """The same bytes as ascending ranges that neither touch nor overlap, without empty ones.

    Raises:
        InvalidArgumentError: one lies outside of the state.
    """
    found: list[ByteRange] = []
    for offset, size in sorted(ranges):
        if offset < 0 or size < 0 or offset + size > state_bytes:
            raise InvalidArgumentError(
                f"bytes {offset} to {offset + size} are not within a state of {state_bytes}"
            )
        if not size:
            continue
        if found and offset <= found[-1].offset + found[-1].bytes:
            low = found[-1].offset
            found[-1] = ByteRange(low, max(found[-1].bytes, offset + size - low))
        else:
            found.append(ByteRange(offset, size))
    return found


def _ready(
    stream: Iterator[pb.ReadResponse], request: pb.ReadRequest, reporter: Reporter | None
) -> pb.ReadReady:
    for message in stream:
        event = message.WhichOneof("event")
        if event == "ready":
            _check(message.ready, request)
            return message.ready
        if event == "nothing":
            raise StepNotFoundError(f"job {request.job!r} has no committed step yet")
        if event != "progress":
            break
        if reporter is not None:
            reporter.news(message.progress)
    raise FastCheckError("the daemon ended a read without an answer: see its log")


def _check(ready: pb.ReadReady, request: pb.ReadRequest) -> None:
    """Raise CorruptError unless the daemon's answer makes sense."""
    if request.HasField("step") and ready.step != request.step:
        raise CorruptError(f"the daemon answered a read of step {request.step} with step {ready.step}")
    asked = [rank.rank for rank in request.ranks] or list(range(ready.world_size))
    if [rank.rank for rank in ready.ranks] != asked:
        raise CorruptError(f"the daemon answered a read of step {ready.step} with other ranks than asked for")
    end = 0
    for rank in ready.ranks:
        if rank.offset % TENSOR_ALIGNMENT_BYTES or rank.offset < end:
            raise CorruptError(
                f"the states of step {ready.step} do not follow each other in the daemon's segment"
            )
        end = rank.offset + rank.state_bytes
        if rank.header_offset + rank.header_bytes > rank.state_bytes or rank.header_bytes > HEADER_BYTES_MAX:
            raise CorruptError(f"step {ready.step}, rank {rank.rank}, has a header outside of its state")
    if not request.by_stream and end > ready.segment.bytes:
        raise CorruptError(f"step {ready.step} is larger than the segment that it lies in")


def _received(
    stream: Iterator[pb.ReadResponse], request: pb.ReadRequest, ready: pb.ReadReady
) -> MappedSegment:
    """Memory of our own, laid out like the daemon's segment, with the requested bytes in their places."""
    last = ready.ranks[-1]
    try:
        buffer = anonymous(last.offset + last.state_bytes, sparse=True)
    except MemoryError as error:
        raise OutOfMemoryError(f"step {ready.step}: {error}") from None
    places = _places(request, ready)
    place = next(places, None)
    for message in stream:
        data = memoryview(message.data)
        while data:
            if place is None:
                raise CorruptError(f"the daemon sent more of step {ready.step} than was asked for")
            piece = data[: place.bytes]
            buffer.write(place.offset, piece)
            data = data[len(piece) :]
            rest = ByteRange(place.offset + len(piece), place.bytes - len(piece))
            place = rest if rest.bytes else next(places, None)
    if place is not None:
        raise CorruptError(f"the daemon sent less of step {ready.step} than was asked for")
    return buffer


def _places(request: pb.ReadRequest, ready: pb.ReadReady) -> Iterator[ByteRange]:
    """The places of the streamed bytes, in the order in which they arrive."""
    asked = {rank.rank: rank for rank in request.ranks}
    for rank in ready.ranks:
        want = asked.get(rank.rank)
        for each in want.ranges if want is not None else ():
            yield ByteRange(rank.offset + each.offset, each.bytes)
        if (want is None or want.header) and rank.header_bytes:
            yield ByteRange(rank.offset + rank.header_offset, rank.header_bytes)


def _bytes(state: torch.Tensor, where: ByteRange) -> bytes:
    return state[where.offset : where.offset + where.bytes].numpy().tobytes()
