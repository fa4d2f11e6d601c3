"""Which earlier step a shard may be encoded against, and that it stays while it is used."""

import pytest
from tests.unit.fastcheckd.store.store_helpers import CHUNK_BYTES, make_manifest, open_store, payload, put

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.chunks import ChunkTable
from fastcheckd.saving.shards import Bases
from fastcheckd.store.segments import pool_of

OWNER, COPY = pb.REPLICA_KIND_OWNER, pb.REPLICA_KIND_COPY
SIZE = 3 * CHUNK_BYTES + 5
TABLE = ChunkTable.uniform(SIZE, CHUNK_BYTES)


@pytest.fixture
def store(tmp_path):
    found, _ = open_store(tmp_path / "ram", budget_bytes=8 << 20)
    yield found
    found.close()


def own(store, step, *, seed=1, size=SIZE, **more):
    return put(store, payload(seed, size), step=step, kind=OWNER, **more)


def key(step, *, rank=0, shard=0):
    return pb.ShardKey(job="gpt", step=step, rank=rank, shard=shard)


def found(store, wanted, *, offset=0, table=TABLE):
    with Bases(store) as bases:
        base = bases.find(wanted, offset, table)
        return None if base is None else base.step


def test_the_newest_earlier_step_is_the_base(store):
    for step in (1, 3, 2, 7):
        own(store, step, seed=step)
    assert found(store, key(5)) == 3
    with Bases(store) as bases:
        base = bases.find(key(5), 0, TABLE)
        assert bytes(base.view) == payload(3, SIZE) and base.view.readonly
        manifest = make_manifest(payload(3, SIZE), step=3, kind=OWNER)
        assert (base.digest, base.chunk_digests) == (manifest.digest, manifest.chunk_digests)


def test_nothing_else_is(store):
    own(store, 1, rank=1)
    own(store, 1, shard=1)
    own(store, 1, job="other")
    own(store, 5)
    own(store, 6)
    put(store, payload(1, SIZE), step=1, kind=COPY)
    assert found(store, key(5)) is None


def test_another_cut_is_no_base_and_an_older_one_with_the_same_may_be(store):
    own(store, 1)
    own(store, 2, size=SIZE + 1)
    own(store, 3, chunk_bytes=2 * CHUNK_BYTES)
    assert found(store, key(5)) == 1
    assert found(store, key(5), offset=4096) is None
    assert found(store, key(5), table=ChunkTable([SIZE])) is None


def test_listed_lengths_and_equal_ones_are_the_same_cut(store):
    data = payload(1, SIZE)
    manifest = make_manifest(data, step=1, kind=OWNER)
    manifest.chunk_lengths.extend(TABLE.lengths)
    segment = store.allocate(SIZE, pool_of(manifest))
    segment.view[:SIZE] = data
    store.publish(manifest, segment, 0, verified=True)
    store.release(segment)
    assert found(store, key(2)) == 1


def test_a_base_stays_while_it_is_used_even_when_it_is_dropped(store):
    held = own(store, 1)
    with Bases(store) as bases:
        base = bases.find(key(2), 0, TABLE)
        store.drop(held)
        recycled = store.allocate(SIZE, held.segment.pool)
        assert recycled is not held.segment
        assert bytes(base.view) == payload(1, SIZE)
        assert held.segment.references == 1
    assert held.segment.references == 0


def test_a_base_that_went_in_between_is_passed_over(store, monkeypatch):
    own(store, 1)
    gone = own(store, 2)
    stale = store.held("gpt")
    store.drop(gone)
    monkeypatch.setattr(store, "held", lambda job: stale)
    assert found(store, key(3)) == 1
