"""A connection's share of a shard, from END to END: the inner loops of sending and receiving.

Both ends of both directions run these two: whoever sends takes the bytes from where they lie and
whoever receives puts them where they belong; nothing is copied in between. What is done about a
bad chunk is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..digests import chunk_range
from ..errors import FrameError
from .frames import Kind, check_data_frame
from .lane import Lane


def send_chunks(
    lane: Lane,
    chunks: Collection[int],
    *,
    source: memoryview,
    chunk_bytes: int,
    digest_of: Callable[[int], bytes],
    moved: Callable[[int], None],
) -> None:
    """Send `chunks` of the shard in `source`, then END. `moved` is told the bytes of each."""
    for index in chunks:
        start, stop = chunk_range(index, len(source), chunk_bytes)
        digest = digest_of(index)
        with source[start:stop] as data:
            lane.send_chunk(index, start, digest, data)
        moved(stop - start)
    lane.send_end(len(chunks))


def receive_chunks(
    lane: Lane,
    chunks: range,
    *,
    shard_bytes: int,
    chunk_bytes: int,
    place_of: Callable[[int], memoryview],
    accept: Callable[[int, memoryview, bytes], None],
    moved: Callable[[int], None],
) -> None:
    """Receive DATA frames up to END, at most one for each of the connection's `chunks`.

    `place_of` tells where a chunk goes, `accept` judges it there against the digest in its frame.

    Raises:
        FrameError, PeerError: see `Lane`. Whatever `accept` raises.
    """
    received = 0
    while True:
        header = lane.receive_header()
        if header.kind == Kind.END:
            if header.chunk != received:
                raise FrameError(f"END speaks of {header.chunk} chunks, {received} came")
            return
        check_data_frame(
            header, shard_bytes=shard_bytes, chunk_bytes=chunk_bytes, first=chunks.start, stride=chunks.step
        )
        if received == len(chunks):
            raise FrameError(f"more than the {len(chunks)} chunks of this connection came")
        with place_of(header.chunk) as place:
            lane.receive_into(place)
            accept(header.chunk, place, header.digest)
        received += 1
        moved(header.raw_bytes)
