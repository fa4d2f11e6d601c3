"""The real SDK at the real service, with a registry that answers what a test wants: a session from both of its ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from tests.eventually import until
from tests.trainer_session import SpokenSession
from tests.unit.fastcheckd.save.save_harness import BUDGET, CHUNK, Node, Registry, running_world

from fastcheck import Checkpointer, OutOfMemoryError
from fastcheck_proto.seal_record import write_record
from fastcheck_proto.v1 import node_pb2, node_pb2_grpc, trainer_pb2_grpc
from fastcheck_proto.v1 import trainer_pb2 as pb
from fastcheckd.services.admission import Admission, Owners
from fastcheckd.services.trainer import TrainerService


class Front(node_pb2_grpc.NodeServiceServicer):
    """Says where the service is."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.port = 0

    async def Describe(self, request: Any, context: Any) -> node_pb2.DescribeResponse:
        return node_pb2.DescribeResponse(
            node_id="owner", data_socket=str(self.socket), data_address=f"127.0.0.1:{self.port}"
        )


class NoLoads:
    """Of a restore room: nothing is restored here."""

    def expect(self, job: str, rank: int) -> None:
        """A process has come."""


class World:
    """A data process' saving side in a thread of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.socket = folder / "data.sock"
        self.address = f"unix://{self.socket}"
        self.settings = settings
        self.node: Node
        self.registry: Registry
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> World:
        self._thread.start()
        self._ready.result(30)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    async def _serve(self) -> None:
        async with running_world(self.folder, **self.settings) as (node, registry, _):
            registry.close_rank = _nothing  # type: ignore[attr-defined]
            self.registry = registry
            node.coordinator.resume()
            async with self.served(node):
                self._ready.set_result(None)
                await self._over.wait()

    @contextlib.asynccontextmanager
    async def served(self, node: Node) -> Any:
        """Let a node's trainers in."""
        self.node = node
        owners = Owners(None, None, enforced=False)  # type: ignore[arg-type]
        service = TrainerService(node.coordinator, NoLoads(), self.registry, owners)  # type: ignore[arg-type]
        front = Front(self.socket)
        server = grpc.aio.server(interceptors=[Admission("c")], options=[("grpc.so_reuseport", 0)])
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(front, server)
        server.add_insecure_port(f"unix:{self.socket}")
        front.port = self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield
        finally:
            await server.stop(0)

    def call(self, action: Callable[[], Any]) -> Any:
        """Do something on the loop's thread."""

        async def run() -> Any:
            found = action()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)


async def _nothing(request: Any, timeout_s: float) -> None:
    return None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


def state(value: float = 1.0, size: int = CHUNK) -> dict[str, torch.Tensor]:
    return {"x": torch.full((size,), float(value))}


def stream_of(world: World, job: str = "gpt") -> Any:
    return world.node.coordinator._ranks[job, 0].stream


def test_saves_near_and_far_are_committed_and_their_segments_come_round_again(world):
    for job, address in (("near", world.address), ("far", f"127.0.0.1:{world.port}")):
        with Checkpointer(job, rank=0, world_size=1, address=address) as ckpt:
            ckpt.prepare(state())
            for step in range(1, 12):
                handle = ckpt.save(step, state(step)).result(timeout=30)
                assert handle.stats["copies"] == 1 and handle.stats["waited_s"] < 5
                for held in world.node.store.held(job):
                    if held.key.step < step - 1:
                        world.node.store.drop(held)
        until(lambda job=job: world.node.coordinator._ranks[job, 0].stream is None)


def test_prepare_reserves_and_says_what_does_not_fit(world):
    with Checkpointer("gpt", rank=0, world_size=1, address=world.address) as ckpt:
        ckpt.prepare(state())
        until(lambda: world.node.store.count_segments("staging.gpt.0.1") == 4)
        assert len(stream_of(world).held) == 2
        started = time.monotonic()
        with pytest.raises(OutOfMemoryError, match=f"of {BUDGET} bytes|ram_budget_bytes"):
            ckpt.prepare(state(size=BUDGET // 4))
        assert time.monotonic() - started < 2
        # What it had it has still.
        handle = ckpt.save(1, state()).result(timeout=30)
        assert handle.committed
        # Operators are told of the same contract, as long as there is a trainer.
        (report,) = world.node.coordinator.reports()
        (memory,) = report.memory
        assert handle.stats["memory"] == "full"
        assert (memory.rank, memory.contract, memory.segments) == (0, pb.MEMORY_CONTRACT_FULL, 4)
    until(lambda: not any(report.memory for report in world.node.coordinator.reports()))


def test_a_save_waits_for_nobody_who_has_to_answer(world):
    """The daemon's loop stands still: `save` returns all the same, its handle goes on when the loop does."""
    with Checkpointer("gpt", rank=0, world_size=1, address=world.address) as ckpt:
        ckpt.save(1, state()).result(timeout=30)
        until(lambda: len(stream_of(world).held) == 2 and len(ckpt._session._lent.held) == 2)
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait(20)

        world._loop.call_soon_threadsafe(stand)
        stands.wait(10)
        started = time.monotonic()
        handle = ckpt.save(2, state(2))
        took_s = time.monotonic() - started
        assert handle.staged and not handle.done and took_s < 0.5
        time.sleep(0.2)
        assert not handle.done
        goes_on.set()
        assert handle.result(timeout=30).committed


def test_a_stream_that_breaks_is_opened_again_and_its_steps_are_followed(world):
    world.registry.waiting = True
    with Checkpointer("gpt", rank=0, world_size=2, address=world.address) as ckpt:
        handle = ckpt.save(1, state())
        until(lambda: handle._told)
        before = stream_of(world)
        ckpt._session._keeper.stream.cut()
        until(lambda: stream_of(world) not in (None, before) and ckpt._session.is_open)
        world.registry.waiting = False
        assert handle.result(timeout=30).committed
        assert ckpt.save(2, state(2)).result(timeout=30).committed


def test_what_was_sealed_on_a_stream_that_only_the_trainer_knows_to_be_lost_is_kept(world):
    """A daemon that was stopped for a while meets the same client's next stream before the end of the one before."""
    with grpc.insecure_channel(f"unix:{world.socket}") as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        with SpokenSession(stub, "gpt", "a") as first, SpokenSession(stub, "other", "a") as other:
            other.opened()
            number = first.opened()
            segment = first.segment(2 * CHUNK)
            sealed = pb.Sealed(
                segment_id=segment.segment_id, step=3, state_bytes=CHUNK, header_bytes=10, header_offset=9
            )
            data = bytearray(segment.segment.bytes)
            write_record(memoryview(data), segment.segment_id, sealed.SerializeToString())
            with Path(segment.segment.path).open("r+b") as file:
                file.write(data)
            with SpokenSession(stub, "gpt", "a", session=number, again=True) as second:
                assert second.opened() == number
                sealed.session = number
                second.say(sealed=sealed)
                until(lambda: second.hear("progress").state == pb.SAVE_STATE_COMMITTED)
                assert first.hear("opened") is None and first.ended == ""


def test_a_newer_process_takes_over_and_the_older_one_is_told(world):
    with Checkpointer("gpt", rank=0, world_size=1, address=world.address) as old:
        old.save(1, state()).result(timeout=30)
        lent = {held.ref.path for held in until(lambda: old._session._lent.held)}
        world.registry.session = 2
        with Checkpointer("gpt", rank=0, world_size=1, address=world.address) as new:
            new.save(2, state(2)).result(timeout=30)
            until(lambda: old._session._fenced)
            until(lambda: not any(Path(path).exists() for path in lent))
            assert not {held.ref.path for held in new._session._lent.held} & lent


def test_what_a_trainer_sealed_and_could_not_say_is_found_in_its_segment(world):
    """And what it only began to copy is not: there is no record of it, or one of another loan."""
    with grpc.insecure_channel(f"unix:{world.socket}") as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        with SpokenSession(stub, "gpt", "a") as session:
            session.opened()
            whole, half = session.segment(2 * CHUNK), session.hear("segment")
            for offered, loan in ((whole, whole.segment_id), (half, whole.segment_id)):
                sealed = pb.Sealed(
                    segment_id=loan, step=7, state_bytes=CHUNK, header_bytes=10, header_offset=CHUNK - 10
                )
                with Path(offered.segment.path).open("r+b") as file:
                    data = bytearray(offered.segment.bytes)
                    write_record(memoryview(data), loan, sealed.SerializeToString())
                    file.write(data)
        held = until(lambda: world.node.store.held("gpt", 7))
        assert held[0].manifest.save_id == whole.segment_id
        until(lambda: not Path(half.segment.path).exists())


def test_a_message_that_makes_no_sense_is_refused_and_the_session_ends_or_goes_on(world):
    with grpc.insecure_channel(f"unix:{world.socket}") as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        for opening in ({"job": "a/b"}, {"world_size": 0}, {"client_id": ""}, {"max_in_flight": 1 << 20}):
            with SpokenSession(stub, **{"job": "gpt", "client_id": "a", **opening}) as session:
                assert session.hear("opened") is None and session.ended == "ERROR_CODE_INVALID"
        with SpokenSession(stub, "gpt", "a") as session:
            number = session.opened()
            for reserve in ({"state_bytes": 0}, {"state_bytes": 1 << 62}, {"state_bytes": 1, "step": 1 << 63},
                            {"state_bytes": 1, "record_bytes": 1 << 40}):  # fmt: skip
                session.say(reserve=pb.ReserveMemory(**reserve))
                assert session.refusal() == "ERROR_CODE_INVALID"
            segment = session.segment(CHUNK)
            for sealed in ({"header_bytes": 0}, {"state_bytes": 1 << 40}, {"step": 1 << 63}):
                said = {"step": 1, "state_bytes": CHUNK, "header_bytes": 1, **sealed}
                session.say(sealed=pb.Sealed(segment_id=segment.segment_id, **said))
                assert session.refusal() == "ERROR_CODE_INVALID"
                segment = session.hear("segment")
            target = pb.UploadTarget(job="gpt", session=number, segment_id=segment.segment_id)
            for wrong, parts in (
                (target, [bytes(segment.segment.bytes + 1)]),
                (target, [b""] * 2 + [bytes(3 << 20)]),
                (pb.UploadTarget(job="gpt", session=number, segment_id="x"), [b"1"]),
                (pb.UploadTarget(job="gpt", session=number + 1, segment_id=segment.segment_id), [b"1"]),
            ):
                requests = [pb.UploadRequest(target=wrong), *(pb.UploadRequest(data=p) for p in parts)]
                with pytest.raises(grpc.RpcError):
                    stub.Upload(iter(requests), timeout=20)
            session.say(open=pb.OpenSession(job="gpt"))
            until(lambda: session.ended == "ERROR_CODE_INVALID")
        with SpokenSession(stub, "gpt", "a") as session:
            session.opened()
            session.say(sealed=pb.Sealed(segment_id="nobody's", step=3))
            assert session.refusal() == "ERROR_CODE_NOT_FOUND"


def test_a_registry_that_is_silent_lets_a_client_that_is_known_come_back(world):
    with Checkpointer("gpt", rank=0, world_size=1, address=world.address) as ckpt:
        ckpt.save(1, state()).result(timeout=30)
        world.registry.silent = True
        before = stream_of(world)
        ckpt._session._keeper.stream.cut()
        until(lambda: stream_of(world) not in (None, before) and ckpt._session.is_open)
        handle = ckpt.save(2, state(2))
        until(lambda: handle.provisional)
        with grpc.insecure_channel(f"unix:{world.socket}") as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            for number in (0, 2, 99):
                with SpokenSession(stub, "gpt", "somebody else", session=number) as thief:
                    assert thief.hear("opened") is None and thief.ended == "ERROR_CODE_NO_QUORUM"
        world.registry.silent = False
        assert handle.result(timeout=30).committed
