"""gRPC between nodes under TLS: who gets in, whom a channel takes for whom, and new certificates without a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.certificates import Authority

from fastcheck_proto.v1 import node_pb2, node_pb2_grpc
from fastcheckd import dialer
from fastcheckd.config import Config
from fastcheckd.dialer import Channels, Dialer
from fastcheckd.errors import ConfigError

PROBE = node_pb2.ProbeRequest()


class Node(node_pb2_grpc.NodeServiceServicer):
    """Answers with whom it takes the caller for."""

    async def Probe(self, request: Any, context: Any) -> node_pb2.ProbeResponse:
        names = context.auth_context().get("peer_uri", [b"nobody"])
        assert context.auth_context().get("ssl_tls_version", [b"TLSv1.3"]) == [b"TLSv1.3"]
        return node_pb2.ProbeResponse(node_id=names[0].decode().rpartition("/")[2])


def dialer_of(authority: Authority, node_id: str, cluster_id: str = "c", **values: float) -> Dialer:
    config = Config(
        cluster_id=cluster_id, node_id=node_id, **authority.settings(cluster_id, node_id, **values)
    )
    return Dialer.of(config)


@contextlib.asynccontextmanager
async def serving(dialer: Dialer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(Node(), server)
    port = dialer.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def asked(channel: grpc.aio.Channel) -> str:
    """Whom the other side takes us for, or the status."""
    async with channel:
        try:
            answer = await node_pb2_grpc.NodeServiceStub(channel).Probe(PROBE, timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return str(answer.node_id)


def run(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story, 60))


def test_two_nodes_know_each_other_by_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async def story() -> None:
        a, b = dialer_of(authority, "a"), dialer_of(authority, "b")
        async with serving(a) as address:
            assert await asked(b.channel("a", address)) == "b"

    run(story())


def test_who_is_not_who_is_meant_gets_nothing(tmp_path: Path) -> None:
    authority, foreign = Authority(tmp_path / "ca"), Authority(tmp_path / "foreign")

    async def story() -> None:
        a = dialer_of(authority, "a")
        good = dialer_of(authority, "b")
        key, cert = ((tmp_path / "ca" / f"b.{kind}").read_bytes() for kind in ("key", "pem"))
        to_a = [("grpc.ssl_target_name_override", "a.c.fastcheck")]
        async with serving(a) as address:
            # As a server: another node, another cluster's node of that name, a certificate of another authority.
            assert await asked(good.channel("c", address)) == "UNAVAILABLE"
            assert await asked(good.channel("", address)) == "UNAVAILABLE"
            other = dialer_of(authority, "b", "d")
            assert await asked(other.channel("a", address)) == "UNAVAILABLE"
            # As a client: plaintext, no certificate, one of another authority.
            assert await asked(Dialer().channel("a", address)) == "UNAVAILABLE"
            bare = grpc.ssl_channel_credentials(authority.ca_file.read_bytes())
            assert await asked(grpc.aio.secure_channel(address, bare, to_a)) == "UNAVAILABLE"
            forged_cert, forged_key = foreign.node("c", "b")
            forged = grpc.ssl_channel_credentials(
                authority.ca_file.read_bytes(), forged_key.read_bytes(), forged_cert.read_bytes()
            )
            assert await asked(grpc.aio.secure_channel(address, forged, to_a)) == "UNAVAILABLE"
            late_cert, late_key = authority.issue("late", "spiffe://c/fastcheck/node/b", days=-0.5)
            late = grpc.ssl_channel_credentials(
                authority.ca_file.read_bytes(), late_key.read_bytes(), late_cert.read_bytes()
            )
            assert await asked(grpc.aio.secure_channel(address, late, to_a)) == "UNAVAILABLE"
            # What was refused is not what everybody gets.
            fine = grpc.ssl_channel_credentials(authority.ca_file.read_bytes(), key, cert)
            assert await asked(grpc.aio.secure_channel(address, fine, to_a)) == "b"
        async with serving(dialer_of(foreign, "a")) as address:
            assert await asked(good.channel("a", address)) == "UNAVAILABLE"
        async with serving(Dialer()) as address:
            assert await asked(good.channel("a", address)) == "UNAVAILABLE"

    run(story())


def test_new_certificates_are_used_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of a new authority, while the old connections live on; and bad files are not used."""
    monkeypatch.setattr(dialer, "_LOOK_S", 0.0)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")

    async def story() -> None:
        a, b = dialer_of(old, "a"), dialer_of(old, "b")
        async with serving(a) as address:
            channels = Channels(b)
            first = channels.to("a", address)
            assert channels.to("a", address) is first
            stub = node_pb2_grpc.NodeServiceStub(first)
            assert (await stub.Probe(PROBE, timeout=60)).node_id == "b"
            (tmp_path / "old" / "b.pem").write_text("half")
            assert channels.to("a", address) is first
            for node_id in ("a", "b"):
                certificate, key = new.node("c", node_id)
                replace(new.ca_file, old.ca_file)
                replace(key, tmp_path / "old" / key.name)
                replace(certificate, tmp_path / "old" / certificate.name)
            second = channels.to("a", address)
            assert second is not first
            answer = await node_pb2_grpc.NodeServiceStub(second).Probe(PROBE, timeout=60)
            assert answer.node_id == "b"
            # A transfer that began on the old connection ends there.
            assert (await stub.Probe(PROBE, timeout=60)).node_id == "b"
            # Who knows the old authority alone is a stranger now.
            stranger = dialer_of(Authority(tmp_path / "third"), "b")
            assert await asked(stranger.channel("a", address)) == "UNAVAILABLE"
            await channels.close()

    run(story())


def replace(source: Path, target: Path) -> None:
    temporary = target.with_name(target.name + ".new")
    temporary.write_bytes(source.read_bytes())
    temporary.chmod(0o600)
    temporary.replace(target)


def test_a_certificate_without_the_hosts_name_is_refused_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("a", "spiffe://c/fastcheck/node/a")
    with pytest.raises(ConfigError, match=r"the host a\.c\.fastcheck"):
        Dialer.of(
            Config(
                cluster_id="c",
                node_id="a",
                tls_cert_file=cert,
                tls_key_file=key,
                tls_ca_file=authority.ca_file,
            )
        )


def test_there_are_never_too_many_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "_CHANNELS_MAX", 3)

    async def story() -> None:
        channels = Channels(Dialer())
        made = [channels.to("n", f"127.0.0.1:{port}") for port in range(1, 5)]
        assert channels.to("n", "127.0.0.1:4") is made[3]
        assert channels.to("n", "127.0.0.1:1") is not made[0]
        assert len(channels._kept) == 3
        await channels.close()
        assert not channels._kept and not channels._retired

    run(story())
