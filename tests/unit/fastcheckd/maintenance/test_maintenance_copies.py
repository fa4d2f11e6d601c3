"""A node makes a copy for itself: from real holders over a real lane, and only when it may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastcheckd.maintenance.copies import FETCHES_MAX, CopyMaker
from fastcheckd.store.ram_store import HeldShard, RamStore
from fastcheckd.transfer.peer_client import PeerClient
from tests.unit.fastcheckd.transfer.transfer_harness import (
    BUDGET,
    CHUNK,
    EPOCH,
    Holder,
    eventually,
    running_holder,
    running_owner,
    some_bytes,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.config import Config
from fastcheckd.counters import Counters
from fastcheckd.errors import (
    FencedError,
    InvalidRequestError,
    NoLeaseError,
    OverBudgetError,
    PeerError,
)
from fastcheckd.identity import Identity
from fastcheckd.maintenance.check import Checker
from fastcheckd.transfer.pacing import Gate, Pacer

LIFE = 4
SIZE = 5 * CHUNK + 17


@dataclass
class Target:
    """The real parts of a node that makes copies; `busy` and `lease` may be changed."""

    store: RamStore
    counters: Counters
    checker: Checker
    identity: Identity
    rooms: list[CopyMaker] = field(default_factory=list)
    busy: bool = False
    lease: bool = True

    @property
    def room(self) -> CopyMaker:
        return self.rooms[0]

    def require_lease(self) -> None:
        if not self.lease:
            raise NoLeaseError("no lease")

    def held(self) -> HeldShard:
        (shard,) = self.store.held()
        return shard


@contextlib.asynccontextmanager
async def running_target(folder: Path, *, trickle_s: float = 0.01) -> AsyncIterator[Target]:
    counters = Counters()
    store = RamStore.open(folder / "target", budget_bytes=BUDGET, counters=counters)
    config = Config(node_id="target", chunk_bytes=CHUNK, ram_budget_bytes=BUDGET, transfer_timeout_s=5.0)
    identity = Identity("target")
    identity.assume(LIFE)
    identity.saw_epoch(EPOCH)
    with ThreadPoolExecutor(4) as executor:
        client = PeerClient(config, counters, executor)
        target = Target(store, counters, Checker(store, executor, counters), identity)
        pacer = Pacer(1e9, burst_bytes=10**9, trickle_s=trickle_s)
        gate = Gate(pacer, lambda: target.busy, lambda: counters.add("repair_pauses"))
        target.rooms.append(
            CopyMaker(
                config=config, identity=identity, store=store, peers=client, counters=counters,
                checker=target.checker, gate=gate, require_lease=target.require_lease,
            )
        )  # fmt: skip
        try:
            yield target
        finally:
            await target.room.stop()
            await client.close()
            store.close()


def play(
    tmp_path: Path, story: Callable[[Holder, Target, bytes], Coroutine[Any, Any, None]], **more: Any
) -> None:
    """A holder with one shard, and a target; the shard's digest."""

    async def whole() -> None:
        async with (
            asyncio.timeout(60),
            running_holder(tmp_path) as holder,
            running_owner() as owner,
            running_target(tmp_path, **more) as target,
        ):
            digest = await owner.put(holder.ref(), some_bytes(SIZE))
            await story(holder, target, digest)

    asyncio.run(whole())


def order(digest: bytes, *sources: pb.Holder, size: int = SIZE) -> peer_pb2.FetchReplicaRequest:
    return peer_pb2.FetchReplicaRequest(
        cluster_id="fastcheck",
        epoch=EPOCH,
        holder_incarnation=LIFE,
        key=pb.ShardKey(job="job", step=5, rank=0, shard=0),
        digest=digest,
        bytes=size,
        sources=sources,
    )


def nobody() -> pb.Holder:
    """A node that has just died."""
    return pb.Holder(
        node=pb.NodeRef(node_id="gone", incarnation=1), data_address="127.0.0.1:1", lane_address="127.0.0.1:1"
    )


def test_a_copy_is_made_from_the_next_source_when_the_first_is_gone(tmp_path: Path) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        answer = await target.room.fetch(order(digest, nobody(), holder.ref()))
        assert answer.digest == digest and not answer.was_here
        held = target.held()
        assert held.kind == pb.REPLICA_KIND_COPY and bytes(held.view) == bytes(some_bytes(SIZE))
        assert held.verified_at_ms and held.first_bad_chunk() is None
        assert target.counters.get("replicas_repaired") == 1
        assert target.counters.get("repair_bytes") == SIZE

    play(tmp_path, story)


def test_what_is_here_already_is_not_fetched_again(tmp_path: Path) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        await target.room.fetch(order(digest, holder.ref()))
        answer = await target.room.fetch(order(digest))  # from nobody
        assert answer.was_here and answer.digest == digest
        assert target.counters.get("replicas_repaired") == 1

    play(tmp_path, story)


def test_two_orders_for_one_shard_make_one_copy_and_an_asker_that_leaves_stops_nothing(
    tmp_path: Path,
) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        target.busy = True
        first = asyncio.create_task(target.room.fetch(order(digest, holder.ref())))
        second = asyncio.create_task(target.room.fetch(order(digest, holder.ref())))
        await eventually(lambda: target.counters.get("repair_pauses") > 0)
        first.cancel()
        target.busy = False
        assert (await second).digest == digest
        assert target.counters.get("replicas_repaired") == 1

    play(tmp_path, story, trickle_s=60.0)


def test_a_copy_waits_while_the_node_has_better_to_do(tmp_path: Path) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        target.busy = True
        fetching = asyncio.create_task(target.room.fetch(order(digest, holder.ref())))
        await eventually(lambda: target.counters.get("repair_pauses") > 0)
        assert target.counters.get("bytes_received") == 0 and not fetching.done()
        target.busy = False
        await fetching
        assert target.counters.get("bytes_received") == SIZE

    play(tmp_path, story, trickle_s=60.0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cluster_id": "other"}, InvalidRequestError),
        ({"holder_incarnation": LIFE - 1}, FencedError),
        ({"epoch": EPOCH - 1}, FencedError),
        ({"digest": b"short"}, InvalidRequestError),
        ({"bytes": BUDGET + 1}, OverBudgetError),
    ],
)
def test_orders_for_others_and_out_of_the_past_are_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        request = order(digest, holder.ref())
        for name, value in change.items():
            setattr(request, name, value)
        with pytest.raises(error):
            await target.room.fetch(request)
        assert target.store.held() == []

    play(tmp_path, story)


def test_a_node_without_its_lease_takes_nothing_not_even_what_it_has_fetched(tmp_path: Path) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        target.lease = False
        with pytest.raises(NoLeaseError):
            await target.room.fetch(order(digest, holder.ref()))
        target.lease, target.busy = True, True
        fetching = asyncio.create_task(target.room.fetch(order(digest, holder.ref())))
        await eventually(lambda: target.counters.get("repair_pauses") > 0)
        target.lease, target.busy = False, False
        with pytest.raises(NoLeaseError):
            await fetching
        assert target.store.held() == []
        usage = target.store.usage()
        assert usage.used_bytes == usage.free_bytes  # nothing leaked

    play(tmp_path, story, trickle_s=60.0)


def test_a_bad_source_is_told_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        (held,) = holder.store.held()
        held.segment.view[held.offset + 7] ^= 1
        with pytest.raises(PeerError, match="none of its holders"):
            await target.room.fetch(order(digest, holder.ref()))
        assert target.store.held() == [] and holder.store.held() == []
        assert holder.counters.get("corrupt_found") == 1

    play(tmp_path, story)


def test_no_more_than_a_few_copies_are_made_at_once(tmp_path: Path) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        target.busy = True
        requests = []
        for shard in range(FETCHES_MAX + 1):
            request = order(digest, holder.ref())
            request.key.shard = shard
            requests.append(request)
        under_way = [asyncio.create_task(target.room.fetch(request)) for request in requests[:-1]]
        await asyncio.sleep(0)
        with pytest.raises(PeerError, match="try again"):
            await target.room.fetch(requests[-1])
        target.busy = False
        await asyncio.gather(*under_way, return_exceptions=True)

    play(tmp_path, story, trickle_s=60.0)


def test_a_check_finds_what_changed_drops_it_and_tells(tmp_path: Path) -> None:
    async def story(holder: Holder, target: Target, digest: bytes) -> None:
        await target.room.fetch(order(digest, holder.ref()))
        held = target.held()
        assert await target.checker.check(held) is True
        told: list[HeldShard] = []
        target.store.on_condemned = told.append
        held.segment.view[held.offset + SIZE - 1] ^= 1
        assert await target.checker.check(held) is False
        assert [shard.id for shard in told] == [held.id]
        assert target.store.held() == [] and target.counters.get("corrupt_found") == 1
        assert await target.checker.check(held) is None

    play(tmp_path, story)
