"""Followers that forward to the leader, over real gRPC; only who leads is made up."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest

from fastcheck_proto.conventions import ERROR_METADATA_KEY, FORWARDED_METADATA_KEY
from fastcheck_proto.v1 import registry_pb2, registry_pb2_grpc
from fastcheckd.config import Config, Voter
from fastcheckd.health.detector import FailureDetector
from fastcheckd.registry.leader import Leader
from fastcheckd.registry.outward import GrpcStubs
from fastcheckd.registry.reports import Reports
from fastcheckd.services import leader_calls
from fastcheckd.services.registry import RegistryService

FORWARDED = ((FORWARDED_METADATA_KEY, "1"),)
LOOKUP = registry_pb2.LookupRequest(job="gpt")


class Follower:
    """An engine that never leads, and holds some voter to be the leader."""

    failure, is_leader, term, voters = None, False, 1, ()
    leader = None


class Counting(RegistryService):
    """Counts the lookups that reach it; answers them itself where it is told to, as a leader."""

    lookups = 0
    answers_after = None

    async def Lookup(self, request, context):
        self.lookups += 1
        if self.answers_after is not None:
            await self.answers_after.wait()
            return registry_pb2.LookupResponse(kept_steps=[7])
        return await super().Lookup(request, context)


class Voters:
    def __init__(self):
        self.stubs = GrpcStubs()
        self.servers, self.services, self.engines, self.addresses = [], [], [], []

    async def start(self, count):
        for i in range(count):
            server = grpc.aio.server()
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            config = Config(
                node_id=f"v{i}",
                voters=(Voter(node_id=f"v{i}", registry_address=address, raft_address="127.0.0.1:1"),),
            )
            engine = Follower()
            reports = Reports(engine, config)
            detector = FailureDetector(suspect_after_s=0.4, down_after_s=0.8)
            leader = Leader(config, engine, reports, detector, lambda: None, wall_ms=lambda: 0)
            service = Counting(config, engine, leader, reports, detector, self.stubs)
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(service, server)
            await server.start()
            for collection, thing in (
                (self.servers, server),
                (self.services, service),
                (self.engines, engine),
                (self.addresses, address),
            ):
                collection.append(thing)

    def believes(self, who, in_whom):
        self.engines[who].leader = Voter(
            node_id=f"v{in_whom}", registry_address=self.addresses[in_whom], raft_address="127.0.0.1:1"
        )

    def lookup(self, who, timeout_s=5.0, metadata=()):
        return self.stubs(self.addresses[who]).Lookup(LOOKUP, timeout=timeout_s, metadata=metadata)


@contextlib.asynccontextmanager
async def started(count):
    voters = Voters()
    await voters.start(count)
    try:
        yield voters
    finally:
        await voters.stubs.close()
        for server in voters.servers:
            await server.stop(None)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value, dict(failed.value.trailing_metadata() or ())


def test_two_voters_that_believe_in_each_other_do_not_forward_for_ever():
    async def scenario():
        async with started(2) as voters:
            voters.believes(0, 1)
            voters.believes(1, 0)
            error, trailing = await failure(voters.lookup(0))
            assert (voters.services[0].lookups, voters.services[1].lookups) == (1, 1)
            assert trailing[ERROR_METADATA_KEY] == "ERROR_CODE_NO_QUORUM"
            assert "voter v1 is not the leader" in error.details(), "the second one's refusal, as it is"

    asyncio.run(scenario())


def test_a_call_is_not_forwarded_twice_nor_to_oneself_nor_to_nobody(monkeypatch):
    monkeypatch.setattr(leader_calls, "LEADERLESS_S_MAX", 0.01)

    async def scenario():
        async with started(2) as voters:
            voters.believes(0, 1)
            error, trailing = await failure(voters.lookup(0, metadata=FORWARDED))
            assert trailing[ERROR_METADATA_KEY] == "ERROR_CODE_NO_QUORUM"
            assert voters.addresses[1] in error.details()
            voters.believes(1, 1)
            error, _ = await failure(voters.lookup(1))
            assert "knows none now" in error.details()
            assert (voters.services[0].lookups, voters.services[1].lookups) == (1, 1)

    asyncio.run(scenario())


def test_a_call_waits_at_a_voter_without_a_leader_until_there_is_one(monkeypatch):
    monkeypatch.setattr(leader_calls, "LEADERLESS_S_MAX", 60.0)

    async def scenario():
        async with started(2) as voters:
            voters.services[1].answers_after = asyncio.Event()
            voters.services[1].answers_after.set()
            waiting = asyncio.ensure_future(voters.lookup(0, timeout_s=30.0))
            async with asyncio.timeout(5):
                while not voters.services[0].lookups:
                    await asyncio.sleep(0.01)
            voters.services[0]._leader.changed()  # of something else
            voters.believes(0, 1)
            assert not waiting.done()
            voters.services[0]._leader.changed()
            assert (await waiting).kept_steps == [7]

    asyncio.run(scenario())


def test_waiting_for_a_leader_ends_in_time_and_is_bounded(monkeypatch):
    monkeypatch.setattr(leader_calls, "LEADERLESS_S_MAX", 60.0)
    monkeypatch.setattr(leader_calls, "WAITING_MAX", 2)

    async def scenario():
        async with started(1) as voters:
            _, trailing = await failure(voters.lookup(0, timeout_s=0.5))
            assert trailing[ERROR_METADATA_KEY] == "ERROR_CODE_NO_QUORUM", "before the caller's time was up"
            waiting = [asyncio.ensure_future(voters.lookup(0, timeout_s=30.0)) for _ in range(2)]
            async with asyncio.timeout(5):
                while voters.services[0]._waiting < 2:
                    await asyncio.sleep(0.01)
            await failure(voters.lookup(0, timeout_s=30.0))
            for call in waiting:
                call.cancel()
            async with asyncio.timeout(5):
                while voters.services[0]._waiting:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_leader_that_does_not_answer_is_no_quorum_within_the_callers_time():
    async def scenario():
        async with started(2) as voters:
            voters.believes(0, 1)
            voters.services[1].answers_after = asyncio.Event()
            error, trailing = await failure(voters.lookup(0, timeout_s=1.0))
            assert trailing[ERROR_METADATA_KEY] == "ERROR_CODE_NO_QUORUM", error
            assert "did not reach the leader" in error.details()
            await voters.servers[1].stop(None)
            error, trailing = await failure(voters.lookup(0))
            assert trailing[ERROR_METADATA_KEY] == "ERROR_CODE_NO_QUORUM", error

    asyncio.run(scenario())


def test_calls_that_are_forwarded_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr(leader_calls, "FORWARDS_MAX", 3)

    async def scenario():
        async with started(2) as voters:
            voters.believes(0, 1)
            voters.services[1].answers_after = asyncio.Event()
            forwarded = [asyncio.ensure_future(voters.lookup(0)) for _ in range(3)]
            async with asyncio.timeout(5):
                while voters.services[1].lookups < 3:
                    await asyncio.sleep(0.01)
            error, _ = await failure(voters.lookup(0))
            assert "forwards 3 calls already" in error.details()
            voters.services[1].answers_after.set()
            assert {tuple((await call).kept_steps) for call in forwarded} == {(7,)}
            assert (await voters.lookup(0)).kept_steps == [7], "there is room again"

    asyncio.run(scenario())
