"""The holder's desk: who is refused, what is reserved, and that every reservation ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastcheckd.store.patches import Patch
from fastcheckd.store.ram_store import HeldShard, RamStore, Segment
from fastcheckd.transfer.incoming import IncomingShard
from fastcheckd.transfer.put_checks import CHUNKS_MAX
from fastcheckd.transfer.put_desk import PutDesk
from transfer_harness import BUDGET, CHUNK, EPOCH, INCARNATION, manifest_of, some_bytes

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.errors import (
    CodecError,
    CorruptError,
    FastCheckdError,
    FencedError,
    FrameError,
    InvalidRequestError,
    NoLeaseError,
    NotHeldError,
    OverBudgetError,
    PeerError,
)
from fastcheckd.health.lease import LeaseHolder
from fastcheckd.transfer.frames import FrameHeader, Kind
from fastcheckd.transfer.tickets import PutGrant, TicketOffice

LEASE_UNTIL_NS = 10**15


@dataclasses.dataclass
class Bench:
    store: RamStore
    counters: Counters
    tickets: TicketOffice
    desk: PutDesk
    lease: LeaseHolder
    incarnation: int = INCARNATION
    epoch: int = EPOCH
    now_s: float = 0.0

    @property
    def reserved_bytes(self) -> int:
        usage = self.store.usage()
        return usage.used_bytes - usage.free_bytes

    def incoming(self, begun: peer_pb2.BeginPutResponse) -> IncomingShard:
        grant = self.tickets.redeem(begun.tickets[0])
        assert isinstance(grant, PutGrant)
        return grant.incoming


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    counters = Counters()
    store = RamStore.open(tmp_path / "ram", budget_bytes=BUDGET, counters=counters)
    tickets = TicketOffice()
    made: Bench
    made_lease = LeaseHolder("holder", lambda: made.incarnation, lambda: int(made.now_s * 1e9))
    made_lease.renew(INCARNATION, LEASE_UNTIL_NS, has_quorum=True)
    desk = PutDesk(
        cluster_id="fastcheck",
        node_id="holder",
        store=store,
        tickets=tickets,
        counters=counters,
        incarnation=lambda: made.incarnation,
        epoch=lambda: made.epoch,
        require_lease=made_lease.require,
        kept_steps=lambda job: (),
        budget_bytes=BUDGET,
        transfer_timeout_s=10.0,
        clock=lambda: made.now_s,
        transfers_max=3,
    )
    made = Bench(store, counters, tickets, desk, made_lease)
    yield made
    desk.close()
    assert made.reserved_bytes == sum(s.segment.size_bytes for s in store.held())
    store.close()


def request(size: int = 3 * CHUNK + 5, *, shard: int = 0, streams: int = 1) -> peer_pb2.BeginPutRequest:
    return peer_pb2.BeginPutRequest(
        cluster_id="fastcheck",
        epoch=EPOCH,
        holder_incarnation=INCARNATION,
        owner=pb.NodeRef(node_id="owner", incarnation=1),
        manifest=manifest_of(size, shard=shard),
        streams=streams,
    )


def receive(incoming: IncomingShard, index: int, piece: bytearray, digest: bytes) -> None:
    """One raw chunk, straight to its place if it may go there."""
    size = len(piece)
    header = FrameHeader(kind=Kind.DATA, chunk=index, raw_bytes=size, encoded_bytes=size, digest=digest)
    incoming.expect(index)
    place = incoming.target.place(header)
    if place is not None:
        place[:] = piece
    uses = incoming.target.settle(header, place if place is not None else memoryview(piece))
    incoming.arrived(index, digest, uses)


def fill(incoming: IncomingShard, data: bytearray) -> bytes:
    """Do what a lane does; the chunk digests."""
    incoming.attach(0, incoming.streams, lambda: None)
    digests = []
    for index in range(len(incoming.table)):
        start, stop = incoming.table.range(index)
        digests.append(chunk_digest(bytes(data[start:stop])))
        receive(incoming, index, data[start:stop], digests[-1])
    incoming.detach(0)
    return b"".join(digests)


def test_a_put_reserves_then_publishes_what_arrived(bench: Bench) -> None:
    data = some_bytes(3 * CHUNK + 5)
    begun = bench.desk.begin(request(len(data)))
    assert bench.reserved_bytes >= len(data)
    assert bench.store.held() == []
    digests = fill(bench.incoming(begun), data)
    digest = shard_digest(digests)
    finish = peer_pb2.FinishPutRequest(transfer_id=begun.transfer_id, chunk_digests=digests, digest=digest)
    assert bench.desk.finish(finish).digest == digest
    (held,) = bench.store.held()
    assert held.view == data
    assert held.kind == pb.REPLICA_KIND_COPY
    assert held.manifest.digest == digest
    assert held.verified_at_ms > 0
    assert bench.counters.get("shards_received") == 1
    assert bench.desk.transfers == 0
    with pytest.raises(NotHeldError):
        bench.desk.finish(finish)


Change = Callable[[peer_pb2.BeginPutRequest], None]
BAD_REQUESTS: list[tuple[type[FastCheckdError], Change]] = [
    (InvalidRequestError, lambda r: setattr(r, "cluster_id", "other")),
    (FencedError, lambda r: setattr(r, "holder_incarnation", INCARNATION - 1)),
    (FencedError, lambda r: setattr(r, "holder_incarnation", INCARNATION + 1)),
    (FencedError, lambda r: setattr(r, "holder_incarnation", 0)),
    (FencedError, lambda r: setattr(r, "epoch", EPOCH - 1)),
    (InvalidRequestError, lambda r: setattr(r.owner, "node_id", "holder")),
    (InvalidRequestError, lambda r: setattr(r.owner, "node_id", "someone-else")),
    (InvalidRequestError, lambda r: setattr(r.owner, "node_id", "../x")),
    (InvalidRequestError, lambda r: setattr(r, "streams", 0)),
    (InvalidRequestError, lambda r: setattr(r, "streams", 17)),
    (InvalidRequestError, lambda r: setattr(r.manifest.key, "job", "../../etc")),
    (InvalidRequestError, lambda r: setattr(r.manifest.key, "job", "")),
    (InvalidRequestError, lambda r: setattr(r.manifest.key, "step", 2**63)),
    (InvalidRequestError, lambda r: setattr(r.manifest.key, "rank", 1)),
    (InvalidRequestError, lambda r: setattr(r.manifest.key, "shard", 4)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "shard_count", 2**31)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "chunk_bytes", 0)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "chunk_bytes", CHUNK - 1)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "chunk_bytes", (16 << 20) + 1)),
    (InvalidRequestError, lambda r: r.manifest.chunk_lengths.extend([CHUNK] * 3)),
    (InvalidRequestError, lambda r: r.manifest.chunk_lengths.extend([CHUNK] * 3 + [0, 5])),
    (InvalidRequestError, lambda r: r.manifest.chunk_lengths.extend([CHUNK] * 3 + [2**32 - 1])),
    (InvalidRequestError, lambda r: r.manifest.chunk_lengths.extend([1] * (CHUNKS_MAX + 1))),
    (InvalidRequestError, lambda r: r.bases.extend([peer_pb2.Base(step=1, digest=bytes(16))] * 5)),
    (InvalidRequestError, lambda r: r.bases.extend([peer_pb2.Base(step=1, digest=bytes(15))])),
    (InvalidRequestError, lambda r: setattr(r.manifest, "offset", 1)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "header_offset", 2**64 - 1)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "kind", pb.REPLICA_KIND_OWNER)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "part", 1)),
    (InvalidRequestError, lambda r: setattr(r.manifest, "digest", bytes(16))),
    (InvalidRequestError, lambda r: r.manifest.MergeFrom(pb.ShardManifest(bytes=2**63, state_bytes=2**63))),
    (OverBudgetError, lambda r: r.manifest.MergeFrom(pb.ShardManifest(bytes=BUDGET + 1, state_bytes=2**40))),
]


@pytest.mark.parametrize("case", range(len(BAD_REQUESTS)))
def test_a_bad_request_is_refused_before_anything_is_reserved(
    bench: Bench, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, change = BAD_REQUESTS[case]
    bad = request()
    change(bad)
    monkeypatch.setattr(bench.store, "allocate", lambda *_, **__: pytest.fail("memory was reserved"))
    with pytest.raises(expected):
        bench.desk.begin(bad)
    assert bench.counters.get("puts_refused") == 1
    assert bench.desk.transfers == 0


def test_a_node_without_an_incarnation_takes_nothing(bench: Bench) -> None:
    bench.incarnation = 0
    bad = request()
    bad.holder_incarnation = 0
    with pytest.raises(FencedError):
        bench.desk.begin(bad)


def test_a_newer_epoch_in_a_request_is_fine_and_teaches_nothing(bench: Bench) -> None:
    ahead = request()
    ahead.epoch = 10**9
    bench.desk.begin(ahead)
    bench.desk.begin(request(shard=1))


def test_a_new_life_between_begin_and_finish_fences_the_put(bench: Bench) -> None:
    data = some_bytes(CHUNK)
    begun = bench.desk.begin(request(len(data)))
    digests = fill(bench.incoming(begun), data)
    bench.incarnation += 1
    with pytest.raises(FencedError):
        bench.desk.finish(
            peer_pb2.FinishPutRequest(
                transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
            )
        )
    assert bench.store.held() == []
    assert bench.reserved_bytes == 0


def test_without_a_lease_no_put_begins_and_none_that_began_is_acknowledged(bench: Bench) -> None:
    data = some_bytes(3 * CHUNK + 5)
    begun = bench.desk.begin(request())
    assert bench.desk.needs_lease(begun.transfer_id)
    digests = fill(bench.incoming(begun), data)
    bench.lease.renew(INCARNATION, 0, has_quorum=True)
    with pytest.raises(NoLeaseError):
        bench.desk.finish(
            peer_pb2.FinishPutRequest(
                transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
            )
        )
    assert bench.store.held() == [] and bench.desk.transfers == 0
    with pytest.raises(NoLeaseError):
        bench.desk.begin(request())
    assert bench.counters.get("puts_refused") == 1
    bench.lease.renew(INCARNATION, LEASE_UNTIL_NS, has_quorum=True)
    bench.desk.begin(request())


def test_a_lease_that_ends_while_a_copy_is_published_leaves_it_unacknowledged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = some_bytes(3 * CHUNK + 5)
    begun = bench.desk.begin(request())
    incoming = bench.incoming(begun)
    digests = fill(incoming, data)
    publish = incoming.publish

    def slowly(manifest: pb.ShardManifest) -> None:
        publish(manifest)
        bench.lease.renew(INCARNATION, 0, has_quorum=True)

    monkeypatch.setattr(incoming, "publish", slowly)
    with pytest.raises(NoLeaseError):
        bench.desk.finish(
            peer_pb2.FinishPutRequest(
                transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
            )
        )


def test_a_provisional_put_needs_no_lease(bench: Bench) -> None:
    bench.lease.renew(INCARNATION, 0, has_quorum=False)
    data = some_bytes(3 * CHUNK + 5)
    asked = request()
    asked.manifest.provisional = asked.provisional = True
    begun = bench.desk.begin(asked)
    assert not bench.desk.needs_lease(begun.transfer_id)
    digests = fill(bench.incoming(begun), data)
    bench.desk.finish(
        peer_pb2.FinishPutRequest(
            transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
        )
    )
    assert len(bench.store.held()) == 1


def test_finishing_with_chunks_missing_or_other_digests_gives_the_memory_back(bench: Bench) -> None:
    begun = bench.desk.begin(request())
    with pytest.raises(InvalidRequestError, match="never arrived"):
        bench.desk.finish(peer_pb2.FinishPutRequest(transfer_id=begun.transfer_id))
    assert bench.reserved_bytes == 0
    data = some_bytes(2 * CHUNK)
    for wrong in ({"chunk_digests": bytes(32)}, {"digest": bytes(16)}):
        begun = bench.desk.begin(request(len(data)))
        digests = fill(bench.incoming(begun), data)
        right = {"chunk_digests": digests, "digest": shard_digest(digests)}
        with pytest.raises(CorruptError):
            bench.desk.finish(peer_pb2.FinishPutRequest(transfer_id=begun.transfer_id, **(right | wrong)))
        assert bench.reserved_bytes == 0
    assert bench.store.held() == []


def test_a_repeated_begin_aborts_the_older_transfer(bench: Bench) -> None:
    first = bench.desk.begin(request(streams=2))
    ended: list[bool] = []
    old = bench.incoming(first)
    old.attach(0, 2, lambda: ended.append(True))
    second = bench.desk.begin(request(streams=2))
    assert ended == [True]
    with pytest.raises(FrameError):
        bench.tickets.redeem(first.tickets[1])
    with pytest.raises(NotHeldError):
        bench.desk.finish(peer_pb2.FinishPutRequest(transfer_id=first.transfer_id))
    both = bench.reserved_bytes
    old.detach(0)
    assert bench.reserved_bytes == both // 2
    bench.tickets.redeem(second.tickets[1])
    assert bench.desk.transfers == 1


def test_an_older_session_of_a_rank_does_not_replace_a_newer_ones_copy(bench: Bench) -> None:
    data = some_bytes(CHUNK)

    def put(session: int) -> None:
        begin = request(len(data))
        begin.manifest.session = session
        begun = bench.desk.begin(begin)
        digests = fill(bench.incoming(begun), data)
        finish = peer_pb2.FinishPutRequest(
            transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
        )
        bench.desk.finish(finish)

    put(session=5)
    with pytest.raises(FencedError, match="session 4 is over"):
        put(session=4)
    put(session=5)
    put(session=6)
    assert [held.manifest.session for held in bench.store.held()] == [6]


def test_an_older_session_does_not_end_a_newer_ones_transfer(bench: Bench) -> None:
    newer = request(CHUNK)
    newer.manifest.session = 5
    begun = bench.desk.begin(newer)
    with pytest.raises(FencedError, match="session 1 is over"):
        bench.desk.begin(request(CHUNK))
    bench.tickets.redeem(begun.tickets[0])
    assert bench.desk.transfers == 1
    assert bench.reserved_bytes == CHUNK


def test_of_two_begins_at_once_the_later_one_wins(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = bench.store.allocate
    later: list[peer_pb2.BeginPutResponse] = []

    def overtaken(size_bytes: int, pool: str, **options: float) -> Segment:
        monkeypatch.setattr(bench.store, "allocate", allocate)
        later.append(bench.desk.begin(request()))
        return allocate(size_bytes, pool, **options)

    monkeypatch.setattr(bench.store, "allocate", overtaken)
    with pytest.raises(FencedError, match="newer put"):
        bench.desk.begin(request())
    bench.tickets.redeem(later[0].tickets[0])
    assert bench.desk.transfers == 1


def test_the_number_of_transfers_is_bounded(bench: Bench) -> None:
    begun = [bench.desk.begin(request(CHUNK, shard=shard)) for shard in range(3)]
    with pytest.raises(PeerError, match="its limit"):
        bench.desk.begin(request(CHUNK, shard=3))
    bench.desk.abort(begun[0].transfer_id)
    bench.desk.abort(begun[0].transfer_id)
    bench.desk.begin(request(CHUNK, shard=3))


def test_over_budget_together_is_refused_and_counted(bench: Bench) -> None:
    bench.desk.begin(request(BUDGET - (1 << 20)))
    with pytest.raises(OverBudgetError):
        bench.desk.begin(request(2 << 20, shard=1))
    assert bench.desk.transfers == 1
    assert bench.counters.get("puts_refused") == 1


def test_idle_transfers_expire_but_not_while_a_connection_is_open(bench: Bench) -> None:
    idle = bench.desk.begin(request(CHUNK, shard=0))
    busy = bench.incoming(bench.desk.begin(request(CHUNK, shard=1)))
    busy.attach(0, 1, lambda: None)
    bench.now_s = 29.0
    young = bench.desk.begin(request(CHUNK, shard=2))
    bench.now_s = 31.0
    assert bench.desk.expire(30.0) == 1
    with pytest.raises(FrameError):
        bench.tickets.redeem(idle.tickets[0])
    bench.tickets.redeem(young.tickets[0])
    busy.detach(0)
    assert bench.desk.expire(30.0) == 0
    bench.now_s = 70.0
    assert bench.desk.expire(30.0) == 2
    assert bench.reserved_bytes == 0


def test_closing_gives_everything_back_and_refuses_more(bench: Bench) -> None:
    bench.desk.begin(request())
    bench.desk.close()
    assert bench.reserved_bytes == 0
    with pytest.raises(PeerError, match="shutting down"):
        bench.desk.begin(request())


def test_no_two_connections_write_the_same_chunk(bench: Bench) -> None:
    incoming = bench.incoming(bench.desk.begin(request(streams=2)))
    with pytest.raises(FrameError, match="stride"):
        incoming.attach(0, 1, lambda: None)
    incoming.attach(0, 2, lambda: None)
    with pytest.raises(FrameError, match="another connection"):
        incoming.attach(0, 2, lambda: None)
    incoming.detach(0)
    with pytest.raises(FrameError, match="another connection"):
        incoming.attach(0, 2, lambda: None)


def test_nothing_is_sealed_while_a_connection_may_write(bench: Bench) -> None:
    incoming = bench.incoming(bench.desk.begin(request(CHUNK, streams=2)))
    incoming.attach(1, 2, lambda: None)
    with pytest.raises(InvalidRequestError, match="still open"):
        incoming.seal()
    incoming.detach(1)


def test_a_bad_chunk_is_missing_and_may_come_again_a_good_one_may_not(bench: Bench) -> None:
    data = some_bytes(CHUNK)
    incoming = bench.incoming(bench.desk.begin(request(CHUNK)))
    incoming.attach(0, 1, lambda: None)
    with pytest.raises(CodecError):
        receive(incoming, 0, data, bytes(16))
    with pytest.raises(FrameError, match="came already"):
        incoming.expect(0)
    incoming.came_bad(0)
    assert incoming.missing(range(1)) == [0]
    receive(incoming, 0, data, chunk_digest(bytes(data)))
    assert incoming.missing(range(1)) == []
    with pytest.raises(FrameError, match="came already"):
        incoming.expect(0)
    incoming.detach(0)


def test_memory_goes_back_only_when_the_last_writer_has_let_go(bench: Bench) -> None:
    begun = bench.desk.begin(request(CHUNK, streams=2))
    incoming = bench.incoming(begun)
    incoming.attach(0, 2, lambda: None)
    incoming.attach(1, 2, lambda: None)
    bench.desk.abort(begun.transfer_id)
    incoming.detach(0)
    assert bench.reserved_bytes == CHUNK
    incoming.detach(1)
    assert bench.reserved_bytes == 0


def put_step(bench: Bench, data: bytearray, step: int, offered: pb.ShardManifest | None = None) -> HeldShard:
    """A whole put of raw chunks, as a lane makes it."""
    begun = bench.desk.begin(stepped(len(data), step, offered))
    digests = fill(bench.incoming(begun), data)
    finish = peer_pb2.FinishPutRequest(
        transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
    )
    bench.desk.finish(finish)
    return bench.store.held(step=step)[0]


def stepped(size: int, step: int, offered: pb.ShardManifest | None = None) -> peer_pb2.BeginPutRequest:
    begin = request(size)
    begin.manifest.key.step = step
    if offered is not None:
        begin.bases.add(step=offered.key.step, digest=offered.digest)
    return begin


def test_raw_chunks_patch_too_and_the_older_step_can_be_had_back(bench: Bench) -> None:
    old, new = some_bytes(3 * CHUNK + 5), some_bytes(3 * CHUNK + 5)
    new[CHUNK] ^= 1
    base = put_step(bench, old, 5)
    begun = bench.desk.begin(stepped(len(new), 6, base.manifest))
    assert begun.base_step == 5
    bench.desk.abort(begun.transfer_id)
    newer = put_step(bench, new, 6, base.manifest)
    assert newer.segment is base.segment
    assert newer.view == new
    (older,) = bench.store.held(step=5)
    assert not older.is_full
    with bench.store.reading(older) as full:
        assert full.view == old
    assert bench.counters.get("patches_undone") == bench.counters.get("patches_applied") == 1
    for held in bench.store.held():
        bench.store.drop(held)


def test_a_reader_that_comes_before_the_patch_is_in_the_books_is_not_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = put_step(bench, some_bytes(CHUNK), 5)
    begin_patch = bench.store.begin_patch

    def wanted_at_once(held: HeldShard, step: int, *, on_wanted: Callable[[], None]) -> Patch:
        patch = begin_patch(held, step, on_wanted=on_wanted)
        patch.want()
        return patch

    monkeypatch.setattr(bench.store, "begin_patch", wanted_at_once)
    with pytest.raises(PeerError, match="reader"):
        bench.desk.begin(stepped(CHUNK, 6, base.manifest))
    assert bench.desk.transfers == 0
    with bench.store.pinned(base):
        pass


def test_closing_undoes_patches(bench: Bench) -> None:
    data = some_bytes(2 * CHUNK)
    base = put_step(bench, data, 5)
    begun = bench.desk.begin(stepped(len(data), 6, base.manifest))
    incoming = bench.incoming(begun)
    incoming.attach(0, 1, lambda: None)
    other = some_bytes(CHUNK, seed=9)
    receive(incoming, 0, other, chunk_digest(bytes(other)))
    bench.desk.close()
    assert bench.counters.get("patches_undone") == 0  # a connection may still write
    incoming.detach(0)
    assert bench.counters.get("patches_undone") == 1
    assert bench.store.held()[0].view == data


def test_a_base_is_taken_only_if_it_is_the_newest_and_lies_at_the_same_place(bench: Bench) -> None:
    data = some_bytes(2 * CHUNK)
    first = put_step(bench, data, 5)
    put_step(bench, data, 7)

    def moved(begin: peer_pb2.BeginPutRequest) -> None:
        begin.manifest.state_bytes += CHUNK
        begin.manifest.offset = CHUNK

    def another_shard(begin: peer_pb2.BeginPutRequest) -> None:
        begin.manifest.key.shard = 1

    second = bench.store.held(step=7)[0]
    for offered, step, change in [
        (first, 8, lambda _: None),
        (second, 7, lambda _: None),
        (second, 6, lambda _: None),
        (second, 8, moved),
        (second, 8, another_shard),
    ]:
        begin = stepped(len(data), step, offered.manifest)
        change(begin)
        begun = bench.desk.begin(begin)
        assert not begun.HasField("base_step")
        bench.desk.abort(begun.transfer_id)
    assert bench.desk.begin(stepped(len(data), 8, second.manifest)).base_step == 7


def provisional(step: int, session: int = 1, shard: int = 0) -> peer_pb2.BeginPutRequest:
    begin = request(shard=shard)
    begin.manifest.key.step, begin.manifest.session = step, session
    begin.provisional = begin.manifest.provisional = True
    return begin


def test_a_provisional_put_may_be_of_an_old_epoch_but_not_for_another_life(bench: Bench) -> None:
    begin = provisional(6)
    begin.epoch = EPOCH - 1
    assert bench.desk.begin(begin).transfer_id
    begin.holder_incarnation = INCARNATION - 1
    with pytest.raises(FencedError, match="incarnation"):
        bench.desk.begin(begin)
    begin = provisional(7)
    begin.provisional = False
    with pytest.raises(InvalidRequestError, match="provisional"):
        bench.desk.begin(begin)


def test_a_provisional_put_of_a_rank_that_a_newer_session_has_is_refused(bench: Bench) -> None:
    newer = request()
    newer.manifest.session = 5
    data = some_bytes(newer.manifest.bytes)
    begun = bench.desk.begin(newer)
    digests = fill(bench.incoming(begun), data)
    bench.desk.finish(
        peer_pb2.FinishPutRequest(
            transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
        )
    )
    with pytest.raises(FencedError, match="session 4 is over"):
        bench.desk.begin(provisional(9, session=4, shard=1))
    assert bench.desk.begin(provisional(9, session=5, shard=1)).transfer_id
