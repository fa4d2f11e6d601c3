"""Lanes under TLS: the same transfers, between nodes that show who they are; everybody else is closed, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.certificates import Authority
from transfer_harness import (
    CHUNK,
    Node,
    eventually,
    running_node,
    some_bytes,
)

from fastcheckd.config import Config
from fastcheckd.errors import ConfigError, PeerError
from fastcheckd.transfer import server as server_module
from fastcheckd.transfer.lane_tls import LaneTls

SIZE = 20 * CHUNK + 17


def tls_of(authority: Authority, node_id: str, *, cluster_id: str = "fastcheck") -> LaneTls:
    files = authority.settings(cluster_id, node_id)
    return LaneTls(Config(cluster_id=cluster_id, node_id=node_id, lane_tls=True, **files))


def run(
    folder: Path,
    story: Callable[[Node, Node], Awaitable[None]],
    *,
    source: LaneTls | None,
    reader: LaneTls | None,
    hello_timeout_s: float = 5.0,
) -> None:
    async def both() -> None:
        async with (
            running_node(folder, "source", tls=source, hello_timeout_s=hello_timeout_s) as there,
            running_node(folder, "reader", tls=reader) as here,
        ):
            await story(there, here)

    asyncio.run(asyncio.wait_for(both(), 60))


def test_a_shard_goes_there_and_comes_back_under_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")

    async def story(source: Node, reader: Node) -> None:
        data = some_bytes(SIZE)
        manifest = source.publish(data)
        assert (await reader.fetch(manifest, source.ref())).wanted.into == data
        await source.offer(reader, manifest)
        assert reader.has_exactly(manifest, data)
        assert source.counters.get("lane_rejected") == 0
        await eventually(lambda: source.server.connections == 0)

    run(tmp_path, story, source=tls_of(authority, "source"), reader=tls_of(authority, "reader"))


@pytest.mark.parametrize(
    ("make_source", "make_reader", "why"),
    [
        (lambda a, _: tls_of(a, "source"), lambda a, _: None, "failed|ended"),
        (
            lambda a, _: None,
            lambda a, _: tls_of(a, "reader"),
            "no TLS on the lane.*lane_tls must be the same",
        ),
        (lambda a, _: tls_of(a, "someone"), lambda a, _: tls_of(a, "reader"), "is that of someone"),
        (lambda a, _: tls_of(a, "source"), lambda a, _: tls_of(a, "thief"), "failed|ended"),
        (
            lambda a, _: tls_of(a, "source"),
            lambda a, b: tls_of(b, "reader"),
            "no TLS on the lane: its certificate",
        ),
        (
            lambda a, _: tls_of(a, "source", cluster_id="other"),
            lambda a, _: tls_of(a, "reader"),
            "is that of nobody of this cluster",
        ),
    ],
    ids=[
        "plain client",
        "plain server",
        "another node",
        "a ticket of another",
        "another authority",
        "another cluster",
    ],
)
def test_who_is_not_who_is_meant_gets_nothing(
    tmp_path: Path,
    make_source: Callable[..., LaneTls | None],
    make_reader: Callable[..., LaneTls | None],
    why: str,
) -> None:
    mine, foreign = Authority(tmp_path / "ca"), Authority(tmp_path / "foreign")

    async def story(source: Node, reader: Node) -> None:
        with pytest.raises(PeerError, match=why):
            await source.offer(reader, source.publish(some_bytes(SIZE)))
        await eventually(lambda: source.server.connections == 0)
        assert source.counters.get("bytes_sent") == 0
        assert reader.reserved_bytes == 0

    run(tmp_path, story, source=make_source(mine, foreign), reader=make_reader(mine, foreign))


def test_a_certificate_of_another_cluster_is_refused_though_the_authority_is_ours(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    source_tls, stranger = tls_of(authority, "source"), tls_of(authority, "reader", cluster_id="other")

    async def story(source: Node, reader: Node) -> None:
        def connect() -> None:
            with socket.create_connection(("127.0.0.1", source.server.port), 5) as sock:
                protected = stranger.context(accepting=False).wrap_socket(sock)
                with protected, contextlib.suppress(ssl.SSLError, ConnectionError):
                    assert protected.recv(1) == b""

        await asyncio.to_thread(connect)
        await eventually(lambda: source.counters.get("lane_rejected") == 1)

    run(tmp_path, story, source=source_tls, reader=tls_of(authority, "reader"))


def test_silent_slow_and_many_strangers_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNPROVED_MAX", 3)
    authority = Authority(tmp_path / "ca")

    async def story(source: Node, reader: Node) -> None:
        address = ("127.0.0.1", source.server.port)
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(3)]
            await eventually(lambda: source.server.connections == 3)
            started = time.monotonic()
            one_more = stack.enter_context(socket.create_connection(address, 5))
            await eventually(lambda: source.counters.get("lane_rejected") == 1)
            assert await asyncio.to_thread(_ends, strangers[0]), "the oldest made room"
            assert source.server.connections == 3
            strangers[1].sendall(b"\x16\x03\x01")  # begins like a handshake, and never goes on
            strangers[2].sendall(b"\x16\x03\x01\x40\x00" + bytes(0x4000))  # noise
            for stranger in (*strangers, one_more):
                assert await asyncio.to_thread(_ends, stranger)
            assert time.monotonic() - started < 18
        await eventually(lambda: source.server.connections == 0)
        assert source.counters.get("lane_rejected") == 4
        await reader.fetch(source.publish(some_bytes(SIZE)), source.ref())

    run(
        tmp_path,
        story,
        source=tls_of(authority, "source"),
        reader=tls_of(authority, "reader"),
        hello_timeout_s=2.0,
    )


def _ends(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_tls_needs_its_files() -> None:
    with pytest.raises(ConfigError, match=r"lane_tls.*needs tls_cert_file"):
        Config(lane_tls=True)
