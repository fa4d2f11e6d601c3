"""Direct questions to a real agent's front door, and to what may stand in its place."""

import asyncio
import contextlib
import socket

import grpc.aio
import pytest
from tests.sockets import free_address

from fastcheck_proto.v1 import common_pb2, node_pb2, node_pb2_grpc
from fastcheckd.config import Config
from fastcheckd.health.probe import ProbeResult, bounded_timeout_s, from_wire, probe, to_wire
from fastcheckd.services.node import NodeService

LIFE = ("n", 5)


@contextlib.asynccontextmanager
async def agent(incarnation, node_id="n"):
    server = grpc.aio.server()

    async def no_voter(cluster_id, voters):
        raise AssertionError("nobody asks this node to vote")

    service = NodeService(Config(node_id=node_id), lambda: incarnation, no_voter)
    node_pb2_grpc.add_NodeServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.contextmanager
def mute():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("incarnation", "node_id", "found"),
    [
        (5, "n", ProbeResult.ANSWERED),
        (6, "n", ProbeResult.REFUSED),
        (0, "n", ProbeResult.REFUSED),
        (5, "other", ProbeResult.REFUSED),
        (3, "other", ProbeResult.REFUSED),
        (4, "n", ProbeResult.SILENT),  # it lives, and has not heard of its new life yet
    ],
)
def test_who_answers_decides(incarnation, node_id, found):
    async def story():
        async with agent(incarnation, node_id) as address:
            assert await probe(address, LIFE, 5.0) is found

    asyncio.run(story())


def test_nobody_there_is_refused_and_somebody_mute_is_silent_in_time():
    async def story():
        assert await probe(free_address(), LIFE, 5.0) is ProbeResult.REFUSED
        with mute() as address:
            loop = asyncio.get_running_loop()
            started = loop.time()
            assert await probe(address, LIFE, 0.2) is ProbeResult.SILENT
            assert 0.19 < loop.time() - started < 5
        for nonsense in ("", "no-port", "h:0", "h:99999"):
            assert await probe(nonsense, LIFE, 5.0) is ProbeResult.SILENT

    asyncio.run(story())


def test_an_agent_asks_for_others_and_says_when_it_asks_for_too_many():
    async def story():
        async with (
            agent(5) as target,
            agent(9, "asker") as asker,
            grpc.aio.insecure_channel(asker) as channel,
        ):
            stub = node_pb2_grpc.NodeServiceStub(channel)

            async def ask(address, timeout_s=5.0):
                node = common_pb2.NodeRef(node_id="n", incarnation=5)
                request = node_pb2.ProbeForRequest(node=node, agent_address=address, timeout_s=timeout_s)
                return from_wire((await stub.ProbeFor(request)).finding)

            assert await ask(target) is ProbeResult.ANSWERED
            assert await ask(free_address()) is ProbeResult.REFUSED
            with mute() as address:
                found = await asyncio.gather(*(ask(address, 1.0) for _ in range(20)))
            assert found.count(ProbeResult.SILENT) == 16 and found.count(None) == 4
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask("x" * 400)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(story())


def test_findings_and_timeouts_of_the_wire_are_taken_with_care():
    assert all(from_wire(to_wire(found)) is found for found in ProbeResult)
    assert to_wire(None) == node_pb2.PROBE_FINDING_UNSPECIFIED and from_wire(0) is from_wire(77) is None
    assert [bounded_timeout_s(t) for t in (0.5, 9.0, float("inf"))] == [0.5, 2.0, 2.0]
    assert all(bounded_timeout_s(t) == 0.01 for t in (0.0, -1.0, float("nan")))
