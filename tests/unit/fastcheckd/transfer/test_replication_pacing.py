"""What holds puts back, and by how much: the cap, other traffic, a restore; and that the kernel's counts are ours."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from transfer_harness import CHUNK, Wanted, eventually, running_node, some_bytes

from fastcheck_proto.v1 import peer_pb2
from fastcheckd.counters import Counters
from fastcheckd.errors import PeerError
from fastcheckd.transfer.channel import Channel
from fastcheckd.transfer.lane_meter import LaneMeter, WireBytes
from fastcheckd.transfer.pacing import Gate, Pacer
from fastcheckd.transfer.replication_pacing import (
    IDLE_SAMPLE_S,
    SAMPLE_S,
    Course,
    ReplicationPacing,
    interface_bytes,
)
from fastcheckd.transfer.target import MemoryTarget

MB = 1_000_000


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes when a test says so."""
    monkeypatch.setattr("fastcheckd.transfer.pacing.time.sleep", lambda _: None)


class ToldMeter(LaneMeter):
    """Says what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def total(self) -> WireBytes:
        return WireBytes(self.sent)


class Stand:
    """A pacing whose clock and interface are told what they show."""

    def __init__(self, *, cap: int = 0, interface: str = "eth0") -> None:
        self.now = 100.0
        self.sent = 0
        self.there = True
        self.restoring = threading.Event()
        self.counters = Counters()
        self.meter = ToldMeter()
        self.pacing = ReplicationPacing(
            cap_bytes_per_s=cap,
            interface=interface,
            restoring=self.restoring.is_set,
            meter=self.meter,
            counters=self.counters,
            chunk_bytes=1 * MB,
            transfer_timeout_s=10.0,
            counted=lambda _: (self.sent, 0) if self.there else None,
            clock=lambda: self.now,
        )

    def others_send(self, bytes_per_s: float, seconds: float = 1.0) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.sent += int(bytes_per_s / 10)
            self.pacing.sample()

    @property
    def told(self) -> tuple[str, int]:
        report = self.pacing.report()
        return report.reason, report.bytes_per_s


def test_nothing_is_held_back_without_cap_traffic_or_restore() -> None:
    stand = Stand()
    stand.others_send(0)
    assert stand.told == ("none", 0)
    for _ in range(1000):
        stand.pacing.wait("s", MB, lambda: None)
    assert stand.counters.get("copies_paced") == 0


def test_the_cap_is_a_rate_for_all_puts_together() -> None:
    stand = Stand(cap=10 * MB, interface="")
    for stream in "ab":
        stand.pacing.begin(stream)
    assert stand.told == ("cap", 10 * MB)
    passed = 0

    def tick() -> None:
        stand.now += 0.01
        if stand.now > 110.0:
            raise PeerError("time is up")

    with pytest.raises(PeerError):
        while True:
            stand.pacing.wait("ab"[passed % 2], MB, tick)
            passed += 1
    assert 95 <= passed <= 103
    assert stand.counters.get("copies_paced") >= 90


def test_puts_give_way_to_others_but_are_in_time_and_never_above_the_cap() -> None:
    stand = Stand(cap=60 * MB)
    with stand.pacing.replicating(300 * MB, lambda: 200.0):
        stand.others_send(100 * MB, 2)
        reason, rate = stand.told
        assert reason == "deadline"
        assert rate == pytest.approx(300 * MB / 98, rel=0.01)
        stand.now = 195.0
        stand.others_send(100 * MB, 1)
        assert stand.told == ("cap", 60 * MB)
    stand.others_send(0, 10)
    assert stand.told == ("cap", 60 * MB)


def test_an_interface_that_went_away_or_was_reset_misleads_nobody() -> None:
    stand = Stand()
    stand.others_send(100 * MB, 1)
    stand.there = False
    stand.others_send(0, 1)
    stand.there, stand.sent = True, 0
    stand.others_send(0, 5)
    assert stand.told == ("none", 0)
    assert stand.pacing.report().capacity_bytes_per_s <= 101 * MB


def test_while_somebody_restores_a_put_has_a_trickle_and_that_is_counted() -> None:
    stand = Stand()
    stand.restoring.set()
    stand.pacing.begin("s")
    passed: list[float] = []

    def tick() -> None:
        stand.now += 0.05
        if stand.now > 122.0:
            stand.restoring.clear()

    for _ in range(20):
        stand.pacing.wait("s", MB, tick)
        passed.append(stand.now - 100.0)
    during = [at for at in passed if at <= 22.0]
    assert during == pytest.approx([5, 10, 15, 20], abs=0.3), (
        "a piece in half the time after which it seems dead"
    )
    assert passed[-1] < 23.0, "when the restore is done, nothing is held back any more"
    assert stand.counters.get("copies_for_restore") >= 4
    stand.restoring.set()
    assert stand.told == ("restore", 0)


def test_what_a_put_needs_goes_by_what_is_left_and_how_much_it_shrinks() -> None:
    course = Course(100 * MB, lambda: 110.0)
    assert course.needs_bytes_per_s(100.0) == pytest.approx(10 * MB)
    course.sent(raw_bytes=50 * MB, sent_bytes=10 * MB)
    assert course.needs_bytes_per_s(100.0) == pytest.approx(1 * MB)
    assert course.needs_bytes_per_s(109.0) == pytest.approx(10 * MB)
    assert math.isfinite(course.needs_bytes_per_s(1000.0))
    course.sent(raw_bytes=60 * MB, sent_bytes=60 * MB)  # a resend
    assert course.needs_bytes_per_s(100.0) == 0.0
    assert Course(MB, lambda: math.inf).needs_bytes_per_s(0.0) == 0.0


def test_a_node_that_restores_takes_the_copies_of_others_by_a_trickle(tmp_path: Path) -> None:
    restoring = threading.Event()
    restoring.set()
    paused = threading.Semaphore(0)
    gate = Gate(Pacer(math.inf, burst_bytes=CHUNK, trickle_s=3600.0), restoring.is_set, paused.release)

    async def story() -> None:
        async with (
            running_node(tmp_path, "owner") as owner,
            running_node(tmp_path, "holder", incoming=gate) as holder,
        ):
            offer = asyncio.create_task(owner.offer(holder, owner.publish(some_bytes(8 * CHUNK))))
            assert await asyncio.to_thread(paused.acquire, timeout=60)
            assert holder.counters.get("bytes_received") == 0 and not offer.done()
            assert not owner.server.serving
            restoring.clear()
            await offer
            assert holder.counters.get("bytes_received") == 8 * CHUNK

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("repair", [False, True])
def test_a_copy_waits_at_its_source_for_a_load(tmp_path: Path, repair: bool) -> None:
    loading = threading.Event()
    loading.set()
    paused = threading.Semaphore(0)
    aside = Gate(Pacer(math.inf, burst_bytes=CHUNK, trickle_s=3600.0), loading.is_set, paused.release)
    purpose = peer_pb2.PURPOSE_REPAIR if repair else peer_pb2.PURPOSE_REPLICATE
    data = some_bytes(8 * CHUNK)

    async def story() -> None:
        async with (
            running_node(tmp_path, "source", gates={purpose: aside}) as source,
            running_node(tmp_path, "reader") as reader,
        ):
            manifest = source.publish(data)
            offer = asyncio.create_task(source.offer(reader, manifest, repair=repair))
            assert await asyncio.to_thread(paused.acquire, timeout=60)
            assert (await reader.fetch(manifest, source.ref())).wanted.into == data, (
                "a load waits for no gate"
            )
            assert not offer.done()
            loading.clear()
            await offer
            assert reader.has_exactly(manifest, data)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_whoever_waits_for_bytes_is_known_while_it_is_served(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_node(tmp_path, "source") as source, running_node(tmp_path, "reader") as reader:
            manifest = source.publish(some_bytes(8 * CHUNK))
            seen = threading.Event()

            class Looks(Wanted):
                async def target(self, *args: Any) -> MemoryTarget:
                    found = await super().target(*args)
                    place = found.place

                    def looking(index: int) -> memoryview:
                        if source.server.serving:
                            seen.set()
                        return place(index)

                    found.place = looking  # type: ignore[method-assign]
                    return found

            fetch = reader.begin_fetch(manifest)
            fetch.wanted = Looks(manifest)
            assert await reader.run(fetch, [source.ref()]) is not None
            assert seen.is_set()
            await eventually(lambda: not source.server.serving)

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.fixture
def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there


def drain(sock: socket.socket, size: int) -> None:
    while size:
        size -= len(sock.recv(1 << 16))


def test_the_kernel_counts_our_bytes_for_open_and_closed_lanes(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    here, there = connection
    with here, there:
        meter, lane, other = LaneMeter(), Channel(here, "b", 5.0), Channel(there, "a", 5.0)
        meter.add(lane)
        assert meter.total() == WireBytes(0, 0)
        here.sendall(b"x" * 300_000)
        drain(there, 300_000)
        assert meter.total() == WireBytes(300_000, 0)
        meter.add(other)
        assert meter.total() == WireBytes(300_000, 300_000)
        meter.remove(lane)
        meter.remove(lane)
        assert meter.total() == WireBytes(300_000, 300_000)


def test_a_limited_lane_is_spaced_by_the_kernel(connection: tuple[socket.socket, socket.socket]) -> None:
    here, there = connection
    with here, there:
        lane = Channel(here, "b", 5.0)
        lane.limit(2 * MB)
        (limited,) = _max_pacing(here)
        assert limited == 2 * MB
        lane.limit(math.inf)
        assert _max_pacing(here)[0] >= 2**32 - 1


def _max_pacing(sock: socket.socket) -> tuple[int]:
    return struct.unpack_from("@Q", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208), 112)


def test_the_machines_own_counters_are_read() -> None:
    found = interface_bytes("lo")
    assert found is not None and found[0] >= 0
    assert interface_bytes("nosuch0") is None


def test_glances_between_samples_find_the_gaps() -> None:
    stand = Stand()

    def others_send(bytes_per_s: float, seconds: float) -> None:
        for glance in range(round(seconds * 100)):
            stand.now += 0.01
            stand.sent += int(bytes_per_s / 100)
            if glance % 10 == 9:
                stand.pacing.sample()
            stand.pacing.glance()

    with stand.pacing.replicating(300 * MB, lambda: 1e9):
        others_send(100 * MB, 2)
        reason, rate = stand.told
        assert reason == "traffic" and rate < 1 * MB, "a trickle: there is all the time of the world"
        others_send(0, 0.05)
        assert stand.told == ("traffic", pytest.approx(90 * MB, rel=0.02))
        others_send(100 * MB, 0.02)
        assert stand.told[1] < 1 * MB
        stand.now += 5.0  # nobody looked meanwhile
        others_send(0, 0.02)
        assert stand.told[1] < 1 * MB


def test_bursts_between_puts_are_known_when_a_put_begins() -> None:
    stand = Stand()
    assert stand.pacing.idle_s() == IDLE_SAMPLE_S
    for _ in range(3):
        stand.others_send(100 * MB, 0.6)
        assert stand.pacing.idle_s() == SAMPLE_S, "over a second a burst would be six tenths of one"
        stand.others_send(0, 0.4)
        assert stand.pacing.idle_s() == SAMPLE_S
    with stand.pacing.replicating(300 * MB, lambda: 1e9):
        stand.pacing.sample()
        assert stand.pacing.report().foreign_bytes_per_s == pytest.approx(100 * MB, rel=0.02)
    stand.others_send(0, 5)
    assert stand.pacing.idle_s() == IDLE_SAMPLE_S


def test_what_waits_in_the_interfaces_queue_makes_it_no_faster() -> None:
    stand = Stand()
    stand.others_send(0, 1)
    stand.meter.sent += 20 * MB  # handed to the interface at once; it sends 100 MB/s
    stand.others_send(100 * MB, 1)
    assert stand.pacing.report().capacity_bytes_per_s == pytest.approx(100 * MB, rel=0.01)


def test_what_waits_in_the_kernel_is_not_there_yet(connection: tuple[socket.socket, socket.socket]) -> None:
    stand = Stand()
    stand.others_send(100 * MB, 4)
    here, there = connection
    with here, there, stand.pacing.replicating(MB, lambda: 0.0) as course:
        here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until the kernel takes no more
                here.send(bytes(1 << 16))
        lane = Channel(here, "b", 5.0)
        stand.pacing.begin(lane)
        course.sent(raw_bytes=MB, sent_bytes=MB)
        assert lane.waiting_bytes() > 0
        stand.others_send(100 * MB)
        assert stand.told[0] == "deadline"
        while lane.waiting_bytes():
            there.recv(1 << 20)
        stand.others_send(100 * MB)
        assert stand.told[0] == "traffic"
        stand.pacing.end(lane)
