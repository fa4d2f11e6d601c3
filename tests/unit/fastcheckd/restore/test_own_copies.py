"""What lies here is checked from the moment that a process takes the rank's place, and once only while that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.restore import own_copies
from fastcheckd.restore.own_copies import OwnCopies
from fastcheckd.restore.tally import Tally

REQUEST = tpb.LoadRequest(job="j", rank=0, world_size=1)


@functools.cache
def segment_of(step: int) -> SimpleNamespace:
    """One for all shards of a step."""
    return Segment(name=f"step {step}", path=f"/dev/shm/{step}", size_bytes=12288, view=memoryview(b""))


class Segment(SimpleNamespace):
    """As the store's, equal to itself only."""

    __hash__ = object.__hash__


class Held:
    """A shard of a step of rank 0; equal to itself only, as the store's are."""

    kind = pb.REPLICA_KIND_OWNER

    def __init__(self, step: int, shard: int, count: int = 2) -> None:
        self.key = pb.ShardKey(job="j", step=step, rank=0, shard=shard)
        self.manifest = pb.ShardManifest(
            key=self.key, shard_count=count, state_bytes=9000, header_offset=4096, header_bytes=7
        )
        self.segment = segment_of(step)
        self.offset, self.chunks = 0, None


def own(monkeypatch, shards: list[Held], going_on: asyncio.Event) -> tuple[OwnCopies, list[int]]:
    """Copies whose checks go on until the event is set, and the steps of the checks that were begun."""
    begun: list[int] = []

    async def count_bad_chunks(view, digests, chunks, executor):
        begun.append(1)
        await going_on.wait()
        return 0

    monkeypatch.setattr(own_copies, "count_bad_chunks", count_bad_chunks)
    store = SimpleNamespace(
        held=lambda job, step: [s for s in shards if step is None or s.key.step == step],
        mapped=lambda held: contextlib.nullcontext(held.segment),
    )
    return OwnCopies(store, ThreadPoolExecutor(1), lambda *_: []), begun


def test_a_load_takes_over_the_checks_that_the_session_began_and_a_later_one_checks_again(monkeypatch):
    async def story() -> None:
        going_on = asyncio.Event()
        copies, begun = own(monkeypatch, [Held(1, 0), Held(1, 1), Held(2, 0), Held(2, 1)], going_on)
        copies.expect("j", 0)
        await asyncio.sleep(0)
        assert len(begun) == 2
        tally = Tally()
        checks = copies.begin_checks(REQUEST, tally)
        assert {held.key.step for held in checks} == {2}
        going_on.set()
        assert all(await asyncio.gather(*checks.values()))
        await asyncio.sleep(0)
        assert len(begun) == 2, "checked twice at once"
        again = copies.begin_checks(REQUEST, Tally())
        assert all(await asyncio.gather(*again.values()))
        assert len(begun) == 4, "what was good a while ago is no proof (G8)"
        where = tally.where()
        assert (where.segment.path, where.state_bytes, where.header_offset, where.header_bytes) == (
            "/dev/shm/2", 9000, 4096, 7
        )  # fmt: skip

    asyncio.run(story())


@pytest.mark.parametrize("shards", [[], [(1, 0)]])
def test_nothing_is_begun_where_no_step_is_whole(monkeypatch, shards):
    async def story() -> None:
        copies, begun = own(monkeypatch, [Held(*shard) for shard in shards], asyncio.Event())
        copies.expect("j", 0)
        tally = Tally()
        assert not copies.begin_checks(REQUEST, tally)
        await asyncio.sleep(0)
        assert not begun
        assert tally.where() is None

    asyncio.run(story())
