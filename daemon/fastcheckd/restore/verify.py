"""Checks a shard's bytes against its digests on many threads: one alone would take longer than the load's copy."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from ..chunks import ChunkTable
from ..digests import DIGEST_BYTES, chunk_digest

#: Chunks that one task hashes: few enough to spread over threads, many enough to cost nothing.
CHUNKS_PER_TASK = 8


def _bad_chunks(view: memoryview, digests: bytes, chunks: ChunkTable, first: int, stop: int) -> int:
    bad = 0
    for index in range(first, stop):
        low, high = chunks.range(index)
        if chunk_digest(view[low:high]) != digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            bad += 1
    return bad


async def count_bad_chunks(view: memoryview, digests: bytes, chunks: ChunkTable, executor: Executor) -> int:
    """Number of chunks of `view` whose xxh3-128 is not the one in `digests` (16 bytes each, in order)."""
    assert len(view) == chunks.shard_bytes
    loop = asyncio.get_running_loop()
    tasks = [
        loop.run_in_executor(
            executor, _bad_chunks, view, digests, chunks, first, min(first + CHUNKS_PER_TASK, len(chunks))
        )
        for first in range(0, len(chunks), CHUNKS_PER_TASK)
    ]
    return sum(await asyncio.gather(*tasks))
