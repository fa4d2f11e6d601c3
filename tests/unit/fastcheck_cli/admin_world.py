"""A real AdminService on a real gRPC server, over a registry and peers whose answers a test sets."""

import asyncio
import threading
import time

import grpc.aio

from fastcheck_proto.v1 import (
    admin_pb2_grpc,
    common_pb2,
    node_pb2,
    node_pb2_grpc,
    peer_pb2,
    registry_pb2,
)
from fastcheckd.config import Config
from fastcheckd.errors import InvalidRequestError, NoQuorumError, PeerError, StepGoneError, UnsafeError
from fastcheckd.services.admin import AdminService

VERIFIED_AT_MS = 1_750_000_000_123


def digest(step):
    return bytes([step]) * 16


class World:
    """What the registry and the nodes would say: three nodes, job `gpt` with steps 4 and 5, step 6 under way."""

    def __init__(self):
        self.states = dict.fromkeys(("node-0", "node-1", "node-2"), registry_pb2.NODE_STATE_UP)
        self.kept_steps = [4, 5]
        self.has_leader = True
        self.registry_error = None
        #: Nodes whose data process accepts calls and never answers, refuses, or lost its memory.
        self.hanging = set()
        self.refusing = set()
        self.empty = set()
        #: What node-0 has set aside for ranks of `gpt`.
        self.memory = []
        #: Steps that are lossy.
        self.lossy = set()
        #: Steps whose ranks hold one state.
        self.replicated = set()
        self.lookups = 0
        #: Nodes being drained, and how often the registry is still asked until such a node may be stopped.
        self.draining = set()
        self.polls_until_safe = 1
        self.survivable = True
        self.voter_ids = ["node-0", "node-1"]
        #: Voters that do not answer.
        self.mute = set()
        self.redundancy = registry_pb2.GetRedundancyResponse(wanted_copies=2)
        #: node id → shards that it finds bad.
        self.bad = {}
        #: Ranks with a trainer; deletions that were done; whether their first answers are lost.
        self.running_ranks = []
        self.deletions = []
        self.answer_is_lost = False
        #: What a verification was asked for.
        self.verified = []
        #: Every question to a node, and how many were open at once at most.
        self.asked = []
        self.open = 0
        self.most_open = 0

    # -- registry

    async def view(self, timeout_s):
        self._maybe_fail()
        nodes = [
            registry_pb2.NodeRecord(
                node_id=name,
                incarnation=3,
                state=state,
                agent_address=f"127.0.0.1:{100 + i}",
                data_address=name,
                voter=name != "node-2",
                ram_budget_bytes=1 << 30,
                reason="registered",
                since_ms=VERIFIED_AT_MS,
                heard_ms_ago=70 if name != "node-2" else None,
                data=registry_pb2.DATA_HEALTH_OK,
                labels={"zone": "z", "rack": f"r{i}"},
            )
            for i, (name, state) in enumerate(self.states.items())
        ]
        return registry_pb2.ClusterView(
            cluster_id="lab",
            epoch=7,
            leader="node-0",
            nodes=nodes,
            jobs=[self._job()],
            voters=self.voter_ids,
            has_leader=self.has_leader,
        )

    async def lookup(self, request, timeout_s):
        self._maybe_fail()
        self.lookups += 1
        step = request.step if request.HasField("step") else max(self.kept_steps, default=None)
        if step is not None and step not in self.kept_steps:
            raise StepGoneError(f"step {step} is not kept")
        record = None if step is None else self.record(step)
        return registry_pb2.LookupResponse(record=record, kept_steps=self.kept_steps)

    async def list_job_steps(self, request, timeout_s):
        self._maybe_fail()
        steps = [
            registry_pb2.StepSummary(
                step=s,
                state=registry_pb2.STEP_STATE_COMMITTED,
                ranks=1,
                world_size=1,
                bytes=9,
                copies=1,
                lossy=s in self.lossy,
                replicated=s in self.replicated,
            )
            for s in self.kept_steps
        ]
        steps.append(
            registry_pb2.StepSummary(step=6, state=registry_pb2.STEP_STATE_REPLICATING, world_size=1)
        )
        return registry_pb2.ListJobStepsResponse(steps=steps)

    async def list_jobs(self, request, timeout_s):
        self._maybe_fail()
        return registry_pb2.ListJobsResponse(jobs=[self._job()])

    async def get_redundancy(self, request, timeout_s):
        self._maybe_fail()
        return self.redundancy

    async def set_draining(self, request, timeout_s):
        self._known(request.node_id)
        (self.draining.add if request.draining else self.draining.discard)(request.node_id)
        return registry_pb2.SetDrainingResponse()

    async def safe_to_stop(self, request, timeout_s):
        self._known(request.node_id)
        if request.node_id in self.draining:
            self.polls_until_safe -= 1
            if self.polls_until_safe < 0:
                return registry_pb2.SafeToStopResponse(safe=True, survivable=True)
        return registry_pb2.SafeToStopResponse(
            survivable=self.survivable,
            reasons=["2 shards of job gpt would have 1 copy, 2 are wanted"],
            short_shards=2,
            lost_shards=0 if self.survivable else 1,
            jobs=["gpt"],
        )

    async def forget(self, request, timeout_s):
        self._known(request.node_id)
        if self.states[request.node_id] != registry_pb2.NODE_STATE_DOWN:
            raise UnsafeError(f"{request.node_id} is not DOWN: stop it first")
        del self.states[request.node_id]
        return registry_pb2.ForgetResponse()

    async def history(self, request, timeout_s):
        self._maybe_fail()
        changes = [
            registry_pb2.Transition(
                epoch=epoch,
                node=common_pb2.NodeRef(node_id=name, incarnation=3),
                to=to,
                reason=why,
                at_ms=at_ms,
            )
            for epoch, name, to, why, at_ms in (
                (5, "node-0", registry_pb2.NODE_STATE_UP, "registered", VERIFIED_AT_MS),
                (6, "node-9", registry_pb2.NODE_STATE_DOWN, "refused by all who asked", VERIFIED_AT_MS + 1),
                (7, "node-9", registry_pb2.NODE_STATE_UNSPECIFIED, "forgotten", VERIFIED_AT_MS + 2),
            )
            if request.node_id in ("", name)
        ]
        return registry_pb2.HistoryResponse(transitions=changes[-request.limit :])

    async def delete_steps(self, request, timeout_s):
        self._maybe_fail()
        wanted = [request.step] if request.HasField("step") else list(self.kept_steps)
        going = [step for step in wanted if step in self.kept_steps]
        kept = [step for step in self.kept_steps if step not in going]
        ends = not request.HasField("step") or (bool(going) and going[-1] == self.kept_steps[-1])
        objection = ""
        if ends and self.running_ranks and not request.even_if_running:
            objection = "job gpt seems to be running"
        if objection and not request.dry_run:
            raise UnsafeError(objection)
        if not request.dry_run:
            self.kept_steps = kept
            self.deletions.append(request)
            if self.answer_is_lost:
                going = []  # it was repeated
        return registry_pb2.DeleteStepsResponse(
            deleted_steps=going,
            kept_steps=kept,
            ends_sessions=ends,
            running_ranks=self.running_ranks,
            refusal=objection,
        )

    async def replace_voter(self, request, timeout_s):
        if request.old_node_id not in self.voter_ids:
            raise InvalidRequestError(f"{request.old_node_id} is no voter")
        self.voter_ids[self.voter_ids.index(request.old_node_id)] = request.new_node_id
        return registry_pb2.ReplaceVoterResponse(
            voters=[
                node_pb2.VoterRecord(
                    node_id=name,
                    registry_address=request.registry_address or f"{name}:1",
                    raft_address=request.raft_address or f"{name}:2",
                )
                for name in self.voter_ids
            ]
        )

    async def add_voters(self, request, timeout_s):
        for voter in request.voters:
            if voter.node_id not in self.voter_ids:
                self.voter_ids.append(voter.node_id)
        return registry_pb2.AddVotersResponse(
            voters=[
                node_pb2.VoterRecord(node_id=name, registry_address=f"{name}:1", raft_address=f"{name}:2")
                for name in self.voter_ids
            ]
        )

    @property
    def voters(self):
        return [node_pb2.VoterRecord(node_id=name) for name in self.voter_ids]

    async def views(self, timeout_s):
        if self.registry_error is not None:
            return dict.fromkeys(self.voter_ids)
        view = await self.view(timeout_s)
        view.version = 30
        return {name: None if name in self.mute else view for name in self.voter_ids}

    def _known(self, name):
        self._maybe_fail()
        if name not in self.states:
            raise InvalidRequestError(f"there is no node {name}")

    def _job(self):
        return registry_pb2.JobView(job="gpt", kept_steps=self.kept_steps, world_size=1)

    def _maybe_fail(self):
        if self.registry_error is not None:
            raise self.registry_error

    def record(self, step):
        shard = registry_pb2.ShardRecord(
            shard=0,
            bytes=9,
            digest=digest(step),
            holders=[common_pb2.NodeRef(node_id="node-1", incarnation=3)],
        )
        rank = registry_pb2.RankRecord(
            rank=0,
            session=2,
            owner=common_pb2.NodeRef(node_id="node-0", incarnation=3),
            state_bytes=9,
            shards=[shard],
            lossy=step in self.lossy,
            shared=common_pb2.SharedPart(shared_bytes=9, stop=9) if step in self.replicated else None,
        )
        return registry_pb2.StepRecord(job="gpt", step=step, world_size=1, copies=1, ranks=[rank])

    # -- peers

    async def list_replicas(self, node_id, data_address, job, step, timeout_s):
        await self._peer(data_address, "list_replicas", timeout_s)
        if data_address in self.empty or data_address == "node-2":
            return []
        return [
            peer_pb2.Replica(
                key=common_pb2.ShardKey(job="gpt", step=s, rank=0, shard=0),
                digest=digest(s),
                bytes=9,
                verified_at_ms=VERIFIED_AT_MS,
                stored_bytes=5,
                lossy=s in self.lossy,
                codecs=[common_pb2.CodecUse(codec="adam", raw_bytes=9, encoded_bytes=3)]
                if data_address == "node-1"
                else [],
            )
            for s in (4, 5)
            if step in (None, s)
        ]

    async def verify_replicas(self, node_id, data_address, job, step, timeout_s):
        await self._peer(data_address, "verify_replicas", timeout_s)
        self.verified.append((data_address, job, step, timeout_s))
        return peer_pb2.VerifyReplicasResponse(
            checked=2, checked_bytes=1000, bad=self.bad.get(data_address, [])
        )

    async def get_stats(self, node_id, data_address, timeout_s):
        await self._peer(data_address, "get_stats", timeout_s)
        saves = peer_pb2.JobSaves(job="gpt", memory=self.memory if node_id == "node-0" else ())
        return peer_pb2.GetStatsResponse(
            ram_used_bytes=1 << 20, ram_budget_bytes=1 << 30, saves=[saves] if saves.memory else ()
        )

    async def _peer(self, name, question, timeout_s):
        self.asked.append((name, question, timeout_s))
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await asyncio.sleep(3600 if name in self.hanging else 0)
        finally:
            self.open -= 1
        if name in self.refusing:
            raise PeerError(f"{name} did not answer")

    def no_quorum(self):
        self.has_leader = False
        self.registry_error = NoQuorumError("the registry has no leader; start a majority of the voters")


class NodeFace(node_pb2_grpc.NodeServiceServicer):
    async def Describe(self, request, context):
        return node_pb2.DescribeResponse(cluster_id="lab", node_id="node-0", incarnation=3, version="1")


class AdminServer:
    """Serves a world in a thread of its own."""

    def __init__(self, world):
        self._world = world
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.address = ""

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = grpc.aio.server()
        service = AdminService(Config(cluster_id="lab"), self._world, self._world)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(NodeFace(), server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)


def seconds(action):
    """How long an action takes."""
    started = time.monotonic()
    action()
    return time.monotonic() - started
