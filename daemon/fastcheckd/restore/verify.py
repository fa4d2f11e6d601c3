"""Checks a shard's bytes against its digests on many threads: one alone would take longer than the load's copy."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from ..digests import DIGEST_BYTES, chunk_count, chunk_digest, chunk_range

#: Chunks that one task hashes: few enough to spread over threads, many enough to cost nothing.
CHUNKS_PER_TASK = 8


def _bad_chunks(view: memoryview, digests: bytes, chunk_bytes: int, first: int, stop: int) -> int:
    bad = 0
    for index in range(first, stop):
        low, high = chunk_range(index, len(view), chunk_bytes)
        if chunk_digest(view[low:high]) != digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            bad += 1
    return bad


async def count_bad_chunks(view: memoryview, digests: bytes, chunk_bytes: int, executor: Executor) -> int:
    """Number of chunks of `view` whose xxh3-128 is not the one in `digests` (16 bytes each, in order)."""
    loop = asyncio.get_running_loop()
    chunks = chunk_count(len(view), chunk_bytes)
    tasks = [
        loop.run_in_executor(
            executor, _bad_chunks, view, digests, chunk_bytes, first, min(first + CHUNKS_PER_TASK, chunks)
        )
        for first in range(0, chunks, CHUNKS_PER_TASK)
    ]
    return sum(await asyncio.gather(*tasks))
