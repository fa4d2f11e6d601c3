"""What nodes ask of each other beside the bytes: what is held, whether it is good, and how they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from transfer_harness import BUDGET, CHUNK, damage, in_a_loop, running_node, running_nodes, some_bytes

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.errors import PeerError


@in_a_loop
async def test_replicas_and_stats_are_told(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        data = some_bytes(CHUNK + 1)
        manifest = owner.publish(data)
        await owner.offer(holder, manifest)
        for job, step, expected in (
            ("", None, 1),
            ("job", None, 1),
            ("job", 5, 1),
            ("job", 0, 0),
            ("x", 5, 0),
        ):
            replicas = await owner.client.list_replicas("holder", holder.data_address, job, step, 5.0)
            assert len(replicas) == expected, (job, step)
        (replica,) = await owner.client.list_replicas("holder", holder.data_address, "", None, 5.0)
        assert (replica.key, replica.kind, replica.owner) == (manifest.key, pb.REPLICA_KIND_COPY, "owner")
        assert (replica.bytes, replica.digest) == (len(data), manifest.digest)
        assert replica.verified_at_ms > 0
        assert [use.codec for use in replica.codecs] == ["raw"]
        assert not replica.lossy
        stats = await owner.client.get_stats("holder", holder.data_address, 5.0)
        assert stats.ram_budget_bytes == BUDGET
        assert len(data) <= stats.ram_used_bytes <= BUDGET
        assert stats.counters["shards_received"] == 1
        with pytest.raises(PeerError):
            await owner.client.get_stats("holder", "127.0.0.1:1", 1.0)


@pytest.mark.parametrize("bad", [False, True])
@in_a_loop
async def test_a_reported_replica_is_dropped_only_if_it_is_bad(tmp_path: Path, bad: bool) -> None:
    async with running_nodes(tmp_path, "source", "reader") as (source, reader):
        manifest = source.publish(some_bytes(CHUNK))
        if bad:
            damage(source.store.held()[0], 9)
        stub = reader.client._stub("source", source.data_address)
        other = peer_pb2.ReportCorruptRequest(key=manifest.key, digest=bytes(16))
        assert not (await stub.ReportCorrupt(other, timeout=5)).dropped
        report = peer_pb2.ReportCorruptRequest(key=manifest.key, digest=manifest.digest)
        assert (await stub.ReportCorrupt(report, timeout=5)).dropped is bad
        assert len(source.store.held()) == (not bad)


@in_a_loop
async def test_as_many_tickets_as_were_asked_for_or_none(tmp_path: Path) -> None:
    async with running_node(tmp_path, "source") as source, running_node(tmp_path, "reader") as reader:
        manifest = source.publish(some_bytes(CHUNK))
        request = peer_pb2.OpenRequest(
            cluster_id="fastcheck", key=manifest.key, digest=manifest.digest, streams=3
        )
        assert len((await reader.client.open(source.ref(), request)).tickets) == 3
        source.tickets._tickets_max = 4
        with pytest.raises(PeerError, match="too many"):
            await reader.client.open(source.ref(), request)
        request.streams = 1
        assert len((await reader.client.open(source.ref(), request)).tickets) == 1, (
            "the others were taken back"
        )
        request.streams = 0
        assert not (await reader.client.open(source.ref(), request)).tickets


@in_a_loop
async def test_requests_to_open_out_of_bounds_are_refused(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader") as (source, reader):
        manifest = source.publish(some_bytes(CHUNK))
        stub = reader.client._stub("source", source.data_address)
        base = peer_pb2.Base(step=1, digest=bytes(16))
        for change in (
            {"streams": 17},
            {"bases": [base] * 5},
            {"bases": [peer_pb2.Base(step=1, digest=bytes(15))]},
            {"reader": "x" * 129},
            {"key": pb.ShardKey(job="../x")},
        ):
            request = peer_pb2.OpenRequest(
                cluster_id="fastcheck", key=manifest.key, digest=manifest.digest, streams=1
            )
            for name in change:
                request.ClearField(name)  # type: ignore[arg-type]
            request.MergeFrom(peer_pb2.OpenRequest(**change))  # type: ignore[arg-type]
            with pytest.raises(Exception, match="malformed|job"):
                await stub.Open(request, timeout=5)
