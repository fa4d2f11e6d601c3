"""The connecting end of the bulk lane: one connection's work in a put and in a get. Blocking.

Which connections there are, and what becomes of the shard, is decided in `peer_client.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastcheck_proto.v1 import common_pb2 as pb

from ..counters import Counters
from ..digests import DIGEST_BYTES, chunk_count, chunk_digest, chunk_range
from ..errors import CorruptError, FrameError
from .chunk_digests import ChunkDigests
from .chunk_stream import receive_chunks, send_chunks
from .frames import RESENDS_MAX, Hello
from .lane import Lane


def put_stream(
    lane: Lane,
    hello: Hello,
    *,
    source: memoryview,
    digests: ChunkDigests,
    counters: Counters,
    moved: Callable[[int], None],
) -> None:
    """Send this connection's chunks, and again those that arrived bad.

    Raises:
        CorruptError: chunks are bad after all repeats: the bytes change here, or the way there is broken.
        FrameError, PeerError: see `Lane`.
    """

    def sent(count: int) -> None:
        counters.add("bytes_sent", count)
        moved(count)

    lane.send_hello(hello)
    own = range(hello.first, len(digests), hello.stride)
    chunks: Sequence[int] = own
    for sending in range(RESENDS_MAX + 1):
        if sending:
            counters.add("chunks_resent", len(chunks))
        send_chunks(
            lane,
            chunks,
            source=source,
            chunk_bytes=digests.chunk_bytes,
            digest_of=digests.chunk,
            moved=sent,
        )
        chunks = lane.receive_result(own)
        if not chunks:
            return
    raise CorruptError(
        f"{len(chunks)} chunks, chunk {chunks[0]} first, arrive bad however often they are sent"
    )


def get_stream(
    lane: Lane,
    hello: Hello,
    *,
    manifest: pb.ShardManifest,
    into: memoryview,
    counters: Counters,
    moved: Callable[[int], None],
) -> None:
    """Receive this connection's chunks into their places; `manifest` has the proved digests.

    Raises:
        CorruptError: a chunk is not what the manifest says.
        FrameError, PeerError: see `Lane`.
    """
    own = range(hello.first, chunk_count(manifest.bytes, manifest.chunk_bytes), hello.stride)
    due = set(own)
    digests = manifest.chunk_digests

    def place_of(index: int) -> memoryview:
        start, stop = chunk_range(index, manifest.bytes, manifest.chunk_bytes)
        return into[start:stop]

    def accept(index: int, place: memoryview, claimed_digest: bytes) -> None:
        digest = chunk_digest(place)
        if digest != digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            counters.add("corrupt_received")
            raise CorruptError(f"chunk {index} is not what was committed")
        due.discard(index)

    def received(count: int) -> None:
        counters.add("bytes_received", count)
        moved(count)

    lane.send_hello(hello)
    receive_chunks(
        lane,
        own,
        shard_bytes=manifest.bytes,
        chunk_bytes=manifest.chunk_bytes,
        place_of=place_of,
        accept=accept,
        moved=received,
    )
    if due:
        raise FrameError(f"the sender ended with {len(due)} of {len(own)} chunks not sent")
