"""Offers to a node: who is refused, what is fetched, and that nothing is left of what was given up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transfer_harness import (
    BUDGET,
    CHUNK,
    EPOCH,
    INCARNATION,
    LEASE_FOR_EVER_NS,
    BadWire,
    Node,
    damage,
    eventually,
    in_a_loop,
    manifest_of,
    running_node,
    running_nodes,
    some_bytes,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.errors import (
    CorruptError,
    FastCheckdError,
    FencedError,
    InvalidRequestError,
    NoLeaseError,
    OverBudgetError,
    PeerError,
)
from fastcheckd.store.draft import Draft
from fastcheckd.transfer import receiver as receiver_module
from fastcheckd.transfer.checks import CHUNKS_MAX, OBSOLETE_MAX, SOURCES_MAX, check_copy, chunk_table
from fastcheckd.transfer.pacing import Gate, Pacer
from fastcheckd.transfer.receiver import REPAIRS_MAX

SIZE = 5 * CHUNK + 17
DATA = some_bytes(SIZE)


class Hold:
    """A gate that a test closes: chunks that come wait before it."""

    def __init__(self) -> None:
        self.shut = threading.Event()
        self._paused = threading.Semaphore(0)
        pacer = Pacer(math.inf, burst_bytes=CHUNK, trickle_s=3600.0)
        self.gate = Gate(pacer, self.shut.is_set, self._paused.release)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self._paused.acquire, timeout=30)


@contextlib.contextmanager
def no_memory_taken(node: Node) -> Any:
    before = node.reserved_bytes
    yield
    assert node.reserved_bytes == before


def lose_lease(node: Node) -> None:
    node.lease.renew(INCARNATION, 0, has_quorum=True)


def no_lease_wait(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    """A lease that is not here is not waited for."""

    async def until_held(timeout_s: float = 0.0) -> None:
        node.lease.require()

    monkeypatch.setattr(node.lease, "until_held", until_held)


# --- a copy is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, CHUNK, SIZE])
@in_a_loop
async def test_an_offer_is_answered_when_the_copy_is_here_and_checked(tmp_path: Path, size: int) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        data = some_bytes(size)
        manifest = owner.publish(data)
        answer = await owner.offer(holder, manifest)
        assert answer.digest == manifest.digest
        assert (answer.was_here, answer.received_bytes) == (False, size)
        assert [(use.codec, use.raw_bytes, use.encoded_bytes) for use in answer.codecs] == (
            [("raw", size, size)] if size else []
        )
        assert holder.has_exactly(manifest, data)
        copy = holder.copy(manifest)
        assert copy.verified_at_ms > 0
        assert copy.manifest.kind == pb.REPLICA_KIND_COPY
        assert (copy.manifest.owner, copy.manifest.session) == ("owner", 1)
        assert list(copy.manifest.codecs) == list(answer.codecs)
        assert holder.counters.get("shards_received") == 1
        assert holder.receiver.arriving == 0


@in_a_loop
async def test_a_copy_is_made_from_whoever_is_there(tmp_path: Path) -> None:
    """The owner has died; a holder has its shard, and offers it as the leader asked."""
    async with running_nodes(tmp_path, "owner", "holder", "another", timeout_s=5.0) as (
        owner,
        holder,
        another,
    ):
        manifest = owner.publish(DATA)
        await owner.offer(holder, manifest)
        gone = pb.Holder(
            node=pb.NodeRef(node_id="gone", incarnation=1),
            data_address="127.0.0.1:1",
            lane_address="127.0.0.1:1",
        )
        await holder.offer(another, manifest, sources=[gone, holder.ref()], repair=True)
        assert another.has_exactly(manifest, DATA)
        assert another.counters.get("replicas_repaired") == 1
        assert another.counters.get("repair_bytes") == SIZE
        assert another.counters.get("shards_received") == 0


@in_a_loop
async def test_what_is_here_already_is_not_fetched_again(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        manifest = owner.publish(DATA)
        await owner.offer(holder, manifest)
        owner.store.drop(owner.store.held()[0])
        for more in ({}, {"repair": True}):
            answer = await owner.offer(holder, manifest, **more)
            assert answer.was_here
            assert answer.digest == manifest.digest
        assert holder.counters.get("bytes_received") == SIZE


@pytest.mark.parametrize("good", [True, False])
@in_a_loop
async def test_a_copy_of_an_earlier_process_is_checked_before_it_counts(tmp_path: Path, good: bool) -> None:
    async with running_node(tmp_path, "owner") as owner:
        manifest = owner.publish(DATA)
        async with running_node(tmp_path, "holder") as holder:
            await owner.offer(holder, manifest)
            if not good:
                damage(holder.copy(manifest), 7)
        async with running_node(tmp_path, "holder") as holder:
            assert holder.copy(manifest).verified_at_ms == 0
            answer = await owner.offer(holder, manifest, repair=True)
            assert answer.was_here is good
            assert holder.copy(manifest).verified_at_ms > 0
            assert holder.has_exactly(manifest, DATA)
            assert holder.counters.get("corrupt_found") == (not good)


# --- refused ----------------------------------------------------------------------------------------

Change = Callable[[peer_pb2.ReplicateRequest], None]
SOURCE = pb.Holder(node=pb.NodeRef(node_id="x"))
BAD_OFFERS: list[tuple[type[FastCheckdError], Change]] = [
    (InvalidRequestError, lambda r: setattr(r, "cluster_id", "other")),
    (FencedError, lambda r: setattr(r, "holder_incarnation", INCARNATION - 1)),
    (FencedError, lambda r: setattr(r, "holder_incarnation", INCARNATION + 1)),
    (FencedError, lambda r: setattr(r, "holder_incarnation", 0)),
    (FencedError, lambda r: setattr(r, "epoch", EPOCH - 1)),
    (InvalidRequestError, lambda r: setattr(r.key, "job", "../../etc")),
    (InvalidRequestError, lambda r: setattr(r.key, "job", "")),
    (InvalidRequestError, lambda r: setattr(r.key, "step", 2**63)),
    (InvalidRequestError, lambda r: setattr(r.key, "rank", 2**32 - 1)),
    (InvalidRequestError, lambda r: setattr(r.key, "shard", 65536)),
    (InvalidRequestError, lambda r: setattr(r, "digest", bytes(15))),
    (InvalidRequestError, lambda r: setattr(r, "digest", b"")),
    (InvalidRequestError, lambda r: r.ClearField("sources")),
    (InvalidRequestError, lambda r: r.sources.extend([SOURCE] * SOURCES_MAX)),
    (InvalidRequestError, lambda r: setattr(r.sources[0].node, "node_id", "../x")),
    (InvalidRequestError, lambda r: r.obsolete_steps.extend(range(OBSOLETE_MAX + 1))),
    (OverBudgetError, lambda r: setattr(r, "bytes", BUDGET + 1)),
    (OverBudgetError, lambda r: setattr(r, "bytes", 2**64 - 1)),
]


@in_a_loop
async def test_a_bad_offer_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        manifest = owner.publish(DATA)
        for number, (expected, change) in enumerate(BAD_OFFERS):
            request = owner.request(manifest)
            change(request)
            with pytest.raises(expected), no_memory_taken(holder):
                await holder.receiver.replicate(request)
            assert holder.counters.get("offers_refused") == number + 1
        with pytest.raises(FencedError, match="no incarnation yet"):
            holder.identity.incarnation = 0
            await owner.offer(holder, manifest, holder_incarnation=0)
        assert holder.counters.get("bytes_received") == 0
        assert holder.store.held() == []


@in_a_loop
async def test_a_node_takes_no_copy_of_its_own_shard(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        manifest = owner.publish(DATA)
        await owner.offer(holder, manifest)
        owner.store.drop(owner.store.held()[0])
        with pytest.raises(InvalidRequestError, match="its own shard"):
            await holder.offer(owner, manifest)
        with pytest.raises(PeerError, match="no other node was named"):
            await owner.offer(owner, manifest)
        assert owner.store.held() == []


def change_manifest(**fields: Any) -> pb.ShardManifest:
    manifest = manifest_of(DATA)
    for name, value in fields.items():
        if name in ("rank", "shard"):
            setattr(manifest.key, name, value)
        else:
            setattr(manifest, name, value)
    return manifest


@pytest.mark.parametrize(
    "fields",
    [
        {"owner": "../x"},
        {"owner": ""},
        {"rank": 1},
        {"world_size": 0},
        {"world_size": 2**32 - 1},
        {"shard": 16},
        {"shard_count": 2**31},
        {"save_id": "x" * 65},
        {"offset": 1},
        {"state_bytes": SIZE - 1},
        {"header_offset": 2**64 - 1},
        {"header_offset": SIZE, "header_bytes": 1},
    ],
)
def test_a_manifest_that_contradicts_itself_becomes_no_copy(fields: dict[str, Any]) -> None:
    check_copy(change_manifest(), "holder")
    with pytest.raises(CorruptError, match="contradicts itself"):
        check_copy(change_manifest(**fields), "holder")


def test_how_a_shard_is_cut_is_bounded_before_anything_is_built() -> None:
    assert len(chunk_table(change_manifest())) == 6
    for fields in (
        {"chunk_bytes": 0},
        {"chunk_bytes": CHUNK - 1},
        {"chunk_bytes": (16 << 20) + 1},
        {"bytes": 2**63},
    ):
        with pytest.raises(InvalidRequestError):
            chunk_table(change_manifest(**fields))
    for lengths in ([CHUNK] * 3, [CHUNK] * 5 + [0, 17], [CHUNK] * 3 + [2**32 - 1], [1] * (CHUNKS_MAX + 1)):
        manifest = change_manifest()
        manifest.chunk_lengths.extend(lengths)
        with pytest.raises(InvalidRequestError):
            chunk_table(manifest)


@in_a_loop
async def test_a_copy_for_which_there_is_no_room_is_refused_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "ROOM_WAIT_S", 0.01)
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", budget_bytes=8 * CHUNK + (1 << 20), job_budget_bytes=0) as holder,
    ):
        first = owner.publish(DATA, shard=0)
        await owner.offer(holder, first)
        big = owner.publish(some_bytes(20 * CHUNK, seed=2), shard=1)
        with pytest.raises(OverBudgetError), no_memory_taken(holder):
            await owner.offer(holder, big)
        assert holder.has_exactly(first, DATA)
        assert holder.counters.get("offers_refused") == 1
        assert holder.counters.get("job_budget_refused") == 0


# --- lease, life and session ------------------------------------------------------------------------


@in_a_loop
async def test_without_a_lease_no_copy_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        no_lease_wait(monkeypatch, holder)
        manifest = owner.publish(DATA)
        lose_lease(holder)
        for repair in (False, True):
            with pytest.raises(NoLeaseError), no_memory_taken(holder):
                await owner.offer(holder, manifest, repair=repair)
        assert holder.counters.get("offers_refused") == 2
        assert holder.store.held() == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lose_lease, NoLeaseError),
        (lambda node: node.identity.assume(INCARNATION + 1), FencedError),
    ],
    ids=["lease", "life"],
)
@in_a_loop
async def test_what_was_true_when_it_began_has_to_be_true_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Node], None], error: type[Exception]
) -> None:
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", incoming=hold.gate) as holder,
    ):
        no_lease_wait(monkeypatch, holder)
        hold.shut.set()
        offer = asyncio.create_task(owner.offer(holder, owner.publish(DATA)))
        await hold.until_reached()
        assert holder.receiver.arriving == 1
        change(holder)
        hold.shut.clear()
        with pytest.raises(error):
            await offer
        assert holder.store.held() == []
        assert holder.reserved_bytes == 0


@in_a_loop
async def test_a_lease_that_comes_with_the_next_life_does_not_count_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", incoming=hold.gate) as holder,
    ):
        hold.shut.set()
        offer = asyncio.create_task(owner.offer(holder, owner.publish(DATA)))
        await hold.until_reached()
        lose_lease(holder)

        async def until_held(timeout_s: float = 0.0) -> None:
            holder.identity.assume(INCARNATION + 1)
            holder.lease.renew(INCARNATION + 1, LEASE_FOR_EVER_NS, has_quorum=True)

        monkeypatch.setattr(holder.lease, "until_held", until_held)
        hold.shut.clear()
        with pytest.raises(FencedError):
            await offer
        assert holder.store.held() == []


@in_a_loop
async def test_a_lease_that_ends_while_a_copy_is_published_leaves_it_unacknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        no_lease_wait(monkeypatch, holder)
        publish = Draft.publish

        def slowly(draft: Draft) -> Any:
            published = publish(draft)
            lose_lease(holder)
            return published

        monkeypatch.setattr(Draft, "publish", slowly)
        with pytest.raises(NoLeaseError):
            await owner.offer(holder, owner.publish(DATA))


@in_a_loop
async def test_an_older_process_of_a_rank_does_not_replace_the_copy_of_a_newer_one(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "new", "old", "holder") as (new, old, holder):
        newer = new.publish(DATA, session=5)
        await new.offer(holder, newer)
        older = old.publish(some_bytes(SIZE, seed=2), session=4)
        with pytest.raises(FencedError, match="session 4 is over"):
            await old.offer(holder, older)
        assert holder.has_exactly(newer, DATA)
        newest = old.publish(some_bytes(SIZE, seed=3), session=6)
        await old.offer(holder, newest)
        assert [replica.manifest.session for replica in holder.store.held()] == [6]


@in_a_loop
async def test_an_older_process_does_not_end_the_copy_of_a_newer_one_under_way(tmp_path: Path) -> None:
    hold = Hold()
    async with (
        running_nodes(tmp_path, "new", "old") as (new, old),
        running_node(tmp_path, "holder", incoming=hold.gate) as holder,
    ):
        newer = new.publish(DATA, session=5)
        older = old.publish(some_bytes(SIZE, seed=2), session=4)
        hold.shut.set()
        offer = asyncio.create_task(new.offer(holder, newer))
        await hold.until_reached()
        with pytest.raises(FencedError, match="session 4 is over"):
            await old.offer(holder, older)
        hold.shut.clear()
        await offer
        assert holder.has_exactly(newer, DATA)


# --- provisional ------------------------------------------------------------------------------------


@in_a_loop
async def test_a_provisional_offer_needs_no_lease_and_no_new_epoch_but_this_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        no_lease_wait(monkeypatch, holder)
        lose_lease(holder)
        manifest = owner.publish(DATA)
        with pytest.raises(FencedError, match="incarnation"):
            await owner.offer(holder, manifest, provisional=True, holder_incarnation=INCARNATION - 1)
        await owner.offer(holder, manifest, provisional=True, epoch=EPOCH - 1)
        assert holder.copy(manifest).manifest.provisional
        assert holder.has_exactly(manifest, DATA)


@in_a_loop
async def test_a_provisional_offer_for_a_rank_that_a_newer_process_has_is_refused(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        await owner.offer(holder, owner.publish(DATA, shard=0, session=5))
        with pytest.raises(FencedError, match="session 4 is over"):
            await owner.offer(holder, owner.publish(DATA, shard=1, session=4, step=9), provisional=True)
        await owner.offer(holder, owner.publish(DATA, shard=1, session=5, step=9), provisional=True)


@in_a_loop
async def test_given_up_provisional_steps_make_room_and_others_stay(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        steps = {step: some_bytes(SIZE, seed=step) for step in range(5, 11)}
        manifests = {step: owner.publish(data, step=step) for step, data in steps.items()}
        holder.kept_steps["job"] = [5]
        await owner.offer(holder, manifests[5])
        for step in (6, 7, 8, 9):
            await owner.offer(holder, manifests[step], provisional=True)
        await owner.offer(holder, manifests[10], provisional=True, obsolete_steps=[5, 6, 9])
        # What is committed stays, whatever the owner says; so do the newest, and what it has perhaps reported.
        assert {replica.key.step for replica in holder.store.held()} == {5, 7, 8, 9, 10}
        assert holder.counters.get("provisional_dropped") == 1
        for step in (5, 7, 8, 9, 10):
            assert holder.has_exactly(manifests[step], steps[step])


# --- together ---------------------------------------------------------------------------------------


@in_a_loop
async def test_two_offers_of_one_shard_make_one_copy_and_one_that_leaves_stops_nothing(
    tmp_path: Path,
) -> None:
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", incoming=hold.gate) as holder,
    ):
        manifest = owner.publish(DATA)
        hold.shut.set()
        first, second = (asyncio.create_task(owner.offer(holder, manifest)) for _ in range(2))
        await hold.until_reached()
        first.cancel()
        await asyncio.wait([first])
        hold.shut.clear()
        assert (await second).digest == manifest.digest
        assert holder.counters.get("shards_received") == 1
        assert holder.counters.get("bytes_received") == SIZE


@in_a_loop
async def test_a_copy_that_nobody_waits_for_ends_and_its_memory_is_free(tmp_path: Path) -> None:
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", incoming=hold.gate) as holder,
    ):
        manifest = owner.publish(DATA)
        hold.shut.set()
        offer = asyncio.create_task(owner.offer(holder, manifest))
        await hold.until_reached()
        assert holder.reserved_bytes > 0
        offer.cancel()
        await asyncio.wait([offer])
        await eventually(lambda: holder.receiver.arriving == 0)
        await eventually(lambda: holder.reserved_bytes == 0)
        await eventually(lambda: owner.server.connections == 0)
        hold.shut.clear()
        await owner.offer(holder, manifest)
        assert holder.has_exactly(manifest, DATA)


@in_a_loop
async def test_an_offer_repeated_while_the_one_that_was_left_ends_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        manifest = owner.publish(DATA)
        draft, asked, go_on = holder.store.draft, threading.Event(), threading.Event()

        def slow(*args: Any, **named: Any) -> Draft:
            asked.set()
            assert go_on.wait(30)
            return draft(*args, **named)

        monkeypatch.setattr(holder.store, "draft", slow)
        request = owner.request(manifest)
        first = asyncio.create_task(holder.receiver.replicate(request))
        await eventually(asked.is_set)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(holder.receiver.replicate(request))
        await asyncio.sleep(0.05)
        go_on.set()
        assert (await second).digest == manifest.digest
        assert holder.has_exactly(manifest, DATA)


@in_a_loop
async def test_a_repair_goes_on_when_the_leader_that_asked_has_gone(tmp_path: Path) -> None:
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", gate=hold.gate) as holder,
    ):
        manifest = owner.publish(DATA)
        hold.shut.set()
        offer = asyncio.create_task(owner.offer(holder, manifest, repair=True))
        await hold.until_reached()
        assert holder.receiver.arriving == 0, "a repair is no copy of a save"
        offer.cancel()
        await asyncio.wait([offer])
        hold.shut.clear()
        await eventually(lambda: holder.counters.get("replicas_repaired") == 1)
        assert (await owner.offer(holder, manifest, repair=True)).was_here


@in_a_loop
async def test_a_later_offer_of_the_same_step_with_other_bytes_takes_the_place_of_the_first(
    tmp_path: Path,
) -> None:
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", incoming=hold.gate) as holder,
    ):
        hold.shut.set()
        first = asyncio.create_task(owner.offer(holder, owner.publish(DATA)))
        await hold.until_reached()
        other = some_bytes(SIZE, seed=2)
        again = owner.publish(other)
        second = asyncio.create_task(owner.offer(holder, again))
        with pytest.raises(FencedError, match="later offer"):
            await first
        hold.shut.clear()
        assert (await second).digest == again.digest
        assert holder.has_exactly(again, other)
        assert len(holder.store.held()) == 1


@in_a_loop
async def test_the_number_of_copies_under_way_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "COPIES_MAX", REPAIRS_MAX + 1)
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", gate=hold.gate, incoming=hold.gate) as holder,
    ):
        manifests = [owner.publish(DATA, shard=shard) for shard in range(REPAIRS_MAX + 2)]
        hold.shut.set()
        under_way = [
            asyncio.create_task(owner.offer(holder, manifest, repair=True))
            for manifest in manifests[:REPAIRS_MAX]
        ]
        for _ in under_way:
            await hold.until_reached()
        with pytest.raises(PeerError, match=f"making {REPAIRS_MAX} copies already"):
            await owner.offer(holder, manifests[-1], repair=True)
        under_way.append(asyncio.create_task(owner.offer(holder, manifests[REPAIRS_MAX])))
        await hold.until_reached()
        with pytest.raises(PeerError, match=f"making {REPAIRS_MAX + 1} copies already"):
            await owner.offer(holder, manifests[-1])
        hold.shut.clear()
        await asyncio.gather(*under_way)
        await owner.offer(holder, manifests[-1])


@in_a_loop
async def test_stopping_ends_the_copies_under_way_and_nobody_writes_any_more(tmp_path: Path) -> None:
    hold = Hold()
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", gate=hold.gate, incoming=hold.gate) as holder,
    ):
        hold.shut.set()
        offers = [
            asyncio.create_task(owner.offer(holder, owner.publish(DATA, shard=shard), repair=bool(shard)))
            for shard in range(2)
        ]
        await hold.until_reached()
        await hold.until_reached()
        await holder.receiver.stop()
        assert holder.reserved_bytes == 0
        for outcome in await asyncio.gather(*offers, return_exceptions=True):
            assert isinstance(outcome, FastCheckdError)


# --- trouble ----------------------------------------------------------------------------------------


@in_a_loop
async def test_bytes_that_changed_since_they_were_hashed_are_never_acknowledged(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        manifest = owner.publish(DATA)
        damage(owner.store.held()[0], 5)
        with pytest.raises(PeerError, match="none of its sources"):
            await owner.offer(holder, manifest)
        assert holder.store.held() == []
        assert holder.counters.get("corrupt_received") == 2
        assert holder.reserved_bytes == 0
        await eventually(lambda: owner.counters.get("corrupt_found") == 1)


@pytest.mark.parametrize("streams", [1, 3])
@in_a_loop
async def test_a_wire_cut_in_the_middle_leaves_nothing_but_the_step_before(
    tmp_path: Path, streams: int
) -> None:
    async with running_nodes(tmp_path, "owner", "holder", streams=streams, timeout_s=2.0) as (owner, holder):
        first = owner.publish(DATA, step=5)
        await owner.offer(holder, first)
        used = holder.reserved_bytes
        changed = some_bytes(SIZE, seed=2)
        second = owner.publish(changed, step=6)
        with BadWire(owner.server.port) as wire:
            wire.cut_at = CHUNK + 5000
            with pytest.raises(PeerError, match="none of its sources"):
                await owner.offer(holder, second, sources=[owner.ref(wire.port)])
        assert holder.reserved_bytes == used
        assert holder.has_exactly(first, DATA)
        await owner.offer(holder, second)
        assert holder.has_exactly(second, changed)


@in_a_loop
async def test_a_holder_that_acknowledges_another_digest_is_not_believed(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):

        async def lies(request: peer_pb2.ReplicateRequest) -> peer_pb2.ReplicateResponse:
            return peer_pb2.ReplicateResponse(digest=bytes(16))

        holder.receiver.replicate = lies  # type: ignore[method-assign]
        with pytest.raises(CorruptError, match="another digest"):
            await owner.offer(holder, owner.publish(DATA))


@in_a_loop
async def test_a_manifest_that_is_proved_and_senseless_is_a_bad_source(tmp_path: Path) -> None:
    """Its chunks are those of the digest; what it says beside is not covered by that."""
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        manifest = owner.publish(DATA)
        truth = holder.client.open

        async def lies(
            source: pb.Holder, request: peer_pb2.OpenRequest, timeout_s: float | None = None
        ) -> peer_pb2.OpenResponse:
            answer = await truth(source, request, timeout_s)
            answer.manifest.offset = 1
            return answer

        holder.client.open = lies  # type: ignore[method-assign]
        with pytest.raises(PeerError, match="contradicts itself"):
            await owner.offer(holder, manifest)
        assert holder.reserved_bytes == 0
