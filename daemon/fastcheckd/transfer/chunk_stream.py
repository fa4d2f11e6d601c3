"""A connection's share of a shard, from END to END: the inner loops of sending and receiving.

Both ends of both directions run these two: whoever sends takes the payloads from where they lie and
whoever receives says where they go; nothing is copied in between. How a payload is made, and what is
done about a bad chunk, is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..chunks import ChunkTable
from ..errors import FrameError
from .frames import Codec, FrameHeader, Kind, check_data_frame
from .lane import Lane
from .shard_source import Payload


def send_chunks(
    lane: Lane,
    chunks: Iterable[tuple[int, Payload]],
    *,
    table: ChunkTable,
    digest_of: Callable[[int], bytes],
    moved: Callable[[int], None],
) -> None:
    """Send `chunks`, each with its index, then END. `moved` is told the payload bytes of each."""
    count = 0
    for index, payload in chunks:
        start, stop = table.range(index)
        lane.send_chunk(index, start, digest_of(index), stop - start, payload.codec, payload.data)
        moved(len(payload.data))
        count += 1
    lane.send_end(count)


def receive_chunks(
    lane: Lane,
    chunks: range,
    *,
    table: ChunkTable,
    codecs: frozenset[Codec],
    place_of: Callable[[FrameHeader], memoryview],
    accept: Callable[[FrameHeader, memoryview], None],
    moved: Callable[[int], None],
) -> None:
    """Receive DATA frames up to END, at most one for each of the connection's `chunks`.

    `place_of` tells where a payload goes, `accept` gets it there, whole. Only `codecs` may come.

    Raises:
        FrameError, PeerError: see `Lane`. Whatever `place_of` and `accept` raise.
    """
    received = 0
    while True:
        header = lane.receive_header()
        if header.kind == Kind.END:
            if header.chunk != received:
                raise FrameError(f"END speaks of {header.chunk} chunks, {received} came")
            return
        check_data_frame(header, table=table, first=chunks.start, stride=chunks.step)
        if header.codec not in codecs:
            raise FrameError(f"chunk {header.chunk} comes as {header.codec.name}, which was not asked for")
        if received == len(chunks):
            raise FrameError(f"more than the {len(chunks)} chunks of this connection came")
        with place_of(header) as place:
            lane.receive_into(place)
            accept(header, place)
        received += 1
        moved(header.encoded_bytes)
