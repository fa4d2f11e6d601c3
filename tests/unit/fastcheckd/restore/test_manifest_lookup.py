"""What holders say of a shard: the first good answer counts, bad ones and silence do not; no bytes are asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.unit.fastcheckd.transfer.transfer_harness import (
    running_nodes,
    some_bytes,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.chunks import ChunkTable
from fastcheckd.errors import CorruptError, LostError, NotHeldError, PeerError
from fastcheckd.restore import manifest_lookup
from fastcheckd.restore.manifest_lookup import ManifestLookup
from fastcheckd.restore.plan import ShardPlan

SIZE = 300
KEY = pb.ShardKey(job="gpt", step=5, rank=0, shard=0)
RECORD = rpb.ShardRecord(shard=0, bytes=SIZE, digest=b"d" * 16)
RANK = rpb.RankRecord(rank=0, state_bytes=SIZE, shards=[RECORD])
GOOD = pb.ShardManifest(
    key=KEY,
    bytes=SIZE,
    state_bytes=SIZE,
    chunk_bytes=100,
    header_offset=256,
    header_bytes=44,
    digest=RECORD.digest,
)


class FakePeers:
    """Answers by node; an Event as the answer is never set."""

    def __init__(self, **answers) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def describe(self, holder, key, digest, shard_bytes):
        name = holder.node.node_id
        assert (key, digest, shard_bytes) == (KEY, RECORD.digest, SIZE)
        self.asked.append(name)
        answer = self.answers[name]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return answer, ChunkTable.of(answer)


def describe(peers, named=("a", "b"), at_once=2, others=(), own=None):
    def holders(names):
        return [pb.Holder(node=pb.NodeRef(node_id=name)) for name in names]

    async def who_else_has(key, digest, nodes):
        return holders(others)

    plan = ShardPlan(RECORD, tuple(holders(named)), at_once)
    store = SimpleNamespace(find=lambda key, kind: own)
    describer = ManifestLookup("me", store, peers, SimpleNamespace(who_else_has=who_else_has))

    async def bounded():
        async with asyncio.timeout(20):
            return await describer.describe(KEY, RANK, plan, {})

    return asyncio.run(bounded())


def changed(**fields):
    manifest = pb.ShardManifest()
    manifest.CopyFrom(GOOD)
    for name, value in fields.items():
        setattr(manifest, name, value)
    return manifest


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(manifest_lookup, "ASK_AGAIN_AFTER_S", 0.0)


def test_what_lies_here_is_asked_nobody():
    peers = FakePeers()
    own = SimpleNamespace(manifest=GOOD, chunks=ChunkTable.of(GOOD))
    assert describe(peers, own=own) == (GOOD, own.chunks)
    assert not peers.asked


def test_one_that_does_not_answer_is_not_waited_for():
    assert describe(FakePeers(a=None, b=GOOD))[0] == GOOD


@pytest.mark.parametrize(
    "bad",
    [
        NotHeldError("gone"),
        PeerError("silent"),
        CorruptError("other digests"),
        changed(offset=1),
        changed(state_bytes=SIZE + 1),
        changed(header_offset=257),
        changed(header_bytes=2**40, header_offset=0),
    ],
)
def test_whoever_is_wrong_is_passed_over(bad):
    assert describe(FakePeers(a=bad, b=GOOD))[0] == GOOD
    # Those that are called DOWN, then those that the commit does not name, then everybody once more.
    assert describe(FakePeers(a=bad, b=GOOD), at_once=1)[0] == GOOD
    assert describe(FakePeers(a=bad, c=GOOD), named=("a",), others=("c",))[0] == GOOD
    assert describe(FakePeers(a=[bad, GOOD]), named=("a",), at_once=1)[0] == GOOD


def test_when_nobody_can_say_it_the_shard_is_lost():
    with pytest.raises(LostError, match=r"shard 0 of rank 0, step 5 .*silent; other digests"):
        describe(FakePeers(a=PeerError("silent"), b=CorruptError("other digests")), at_once=1)
    with pytest.raises(LostError, match="none of its holders is known"):
        describe(FakePeers(), named=())


def test_a_real_holder_gives_its_manifest_and_no_byte(tmp_path):
    async def story():
        async with running_nodes(tmp_path, "holder", "reader") as (holder, reader):
            manifest = holder.publish(some_bytes(SIZE))
            plan = ShardPlan(rpb.ShardRecord(shard=0, bytes=SIZE, digest=manifest.digest), (holder.ref(),), 1)
            rank = rpb.RankRecord(rank=0, state_bytes=SIZE, shards=[plan.record])
            describer = ManifestLookup("reader", reader.store, reader.fetcher, None)
            found, table = await describer.describe(manifest.key, rank, plan, {})
            assert (found, table) == (manifest, ChunkTable.of(manifest))
            assert holder.counters.get("bytes_sent") == 0

    asyncio.run(story())
