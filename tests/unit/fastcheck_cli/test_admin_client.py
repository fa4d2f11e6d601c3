"""The admin service and its Python client, over real gRPC: shapes, partial answers, errors."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from fastcheck.admin import AdminClient
from fastcheck.errors import (
    DaemonUnavailableError,
    InvalidArgumentError,
    RegistryUnavailableError,
    StepNotFoundError,
    UnsafeError,
)
from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheck_proto.v1.peer_pb2 import RankMemory
from fastcheck_proto.v1.trainer_pb2 import MEMORY_CONTRACT_LEAN
from fastcheckd.errors import PeerError
from fastcheckd.services import admin_changes
from fastcheckd.services.admin import STATUS_S

from .admin_world import VERIFIED_AT_MS, digest


@pytest.fixture
def client(address):
    with AdminClient(address) as client:
        yield client


def test_status_of_a_whole_cluster(client):
    assert client.status() == {
        "health": "OK",
        "codes": [],
        "epoch": 7,
        "leader": "node-0",
        "nodes_up": 3,
        "nodes_total": 3,
        "cluster_id": "lab",
        "voters": ["node-0", "node-1"],
        "redundancy": {
            "wanted_copies": 2,
            "short_shards": 0,
            "short_bytes": 0,
            "lost_shards": 0,
            "domains_short_shards": 0,
            "repairing": 0,
            "repaired": 0,
            "repair_failures": 0,
            "last_failure": None,
        },
        "survival": [
            {"losses": 2, "probability": pytest.approx(2 / 3)},
            {"losses": 3, "probability": 0.0},
        ],
    }


def test_nodes_have_the_promised_keys(client):
    node = client.nodes()["nodes"][2]
    assert {key: node[key] for key in ("node_id", "state", "incarnation", "address", "voter")} == {
        "node_id": "node-2",
        "state": "UP",
        "incarnation": 3,
        "address": "127.0.0.1:102",
        "voter": False,
    }
    assert (node["ram_used_bytes"], node["ram_budget_bytes"], node["reachable"]) == (1 << 20, 1 << 30, True)
    assert (node["reason"], node["since_ms"]) == ("registered", VERIFIED_AT_MS)
    assert (node["heard_ms_ago"], node["data"]) == (None, "OK")
    assert node["labels"] == {"rack": "r2", "zone": "z"}
    assert client.nodes()["nodes"][0]["heard_ms_ago"] == 70


def test_jobs_and_checkpoints(client):
    assert client.jobs()["jobs"] == [
        {
            "job": "gpt",
            "world_size": 1,
            "newest_step": 5,
            "last_commit_at": None,
            "last_commit_age_s": None,
            "kept_steps": [4, 5],
            "owner": "local",
        }
    ]
    found = client.checkpoints("gpt")["checkpoints"]
    assert [(c["step"], c["state"]) for c in found] == [
        (4, "committed"),
        (5, "committed"),
        (6, "replicating"),
    ]
    assert found[0] == {
        "step": 4,
        "state": "committed",
        "ranks": 1,
        "world_size": 1,
        "bytes": 9,
        "copies": 1,
        "lossy": False,
        "replicated": False,
    }


def test_replicas_of_all_kept_steps_and_of_one(client):
    found = client.replicas("gpt")
    assert [r["step"] for r in found["replicas"]] == [4, 5]
    assert found["replicas"][1] == {
        "step": 5,
        "rank": 0,
        "shard": 0,
        "owner": "node-0",
        "holders": ["node-1"],
        "placed": ["node-1"],
        "owner_holds": True,
        "bytes": 9,
        "digest": digest(5).hex(),
        "verified_at": "2025-06-15T15:06:40.123Z",
        "stored_bytes": 10,
        "lossy": False,
        "codecs": {"adam": {"raw_bytes": 9, "encoded_bytes": 3}},
    }
    assert [r["step"] for r in client.replicas("gpt", 4)["replicas"]] == [4]


def test_inspect_joins_record_and_replicas(client):
    found = client.inspect("gpt", 5)
    assert (found["job"], found["step"], found["copies"], found["bytes"]) == ("gpt", 5, 1, 9)
    assert found["ranks"] == [
        {
            "rank": 0,
            "owner": "node-0",
            "incarnation": 3,
            "session": 2,
            "bytes": 9,
            "shards": 1,
            "lossy": False,
            "codecs": {"adam": {"raw_bytes": 9, "encoded_bytes": 3}},
            "memory": None,
        }
    ]
    assert found["lossy"] is False
    assert found["replicas"][0]["holders"] == ["node-1"]


def test_inspect_says_what_memory_contract_a_rank_has(client, world):
    world.memory = [RankMemory(rank=0, contract=MEMORY_CONTRACT_LEAN, segments=2, bytes=18)]
    (rank,) = client.inspect("gpt", 5)["ranks"]
    assert rank["memory"] == {"contract": "lean", "segments": 2, "bytes": 18}
    world.hanging = {"node-0"}
    (rank,) = client.inspect("gpt", 5)["ranks"]
    assert rank["memory"] is None, "its node does not answer"


def test_a_lossy_step_is_called_so_everywhere(client, world):
    world.lossy = {5}
    assert {c["step"]: c["lossy"] for c in client.checkpoints("gpt")["checkpoints"]} == {
        4: False,
        5: True,
        6: False,
    }
    assert [r["lossy"] for r in client.replicas("gpt")["replicas"]] == [False, True]
    found = client.inspect("gpt", 5)
    assert found["lossy"] and found["ranks"][0]["lossy"]


def test_a_step_whose_ranks_hold_one_state_is_called_so(client, world):
    world.replicated = {5}
    assert [c["replicated"] for c in client.checkpoints("gpt")["checkpoints"]] == [False, True, False]
    assert client.inspect("gpt", 5)["replicated"] is True
    assert client.inspect("gpt", 4)["replicated"] is False


def test_a_step_replaced_while_checkpoints_were_listed_is_no_error(client, world):
    listed = world.list_job_steps

    async def moved_on(request, timeout_s):
        response = await listed(request, timeout_s)
        world.kept_steps = [5, 6]
        return response

    world.list_job_steps = moved_on
    assert [c["step"] for c in client.checkpoints("gpt")["checkpoints"]] == [4, 5, 6]


def test_half_of_eight_nodes_silent_cost_status_one_wait_and_not_one_each(client, world):
    world.states = dict.fromkeys([f"node-{i}" for i in range(8)], registry_pb2.NODE_STATE_UP)
    silent = {"node-4", "node-5", "node-6", "node-7"}
    world.hanging |= silent
    status = client.status()
    assert len({(node, question) for node, question, _ in world.asked}) == len(world.asked) == 16
    assert world.most_open >= 8, "each kind of question goes to all nodes at once"
    # Whoever is asked last may take what is left of the whole, or the least that a living node needs.
    assert all(timeout_s <= STATUS_S for _, _, timeout_s in world.asked)
    unreachable = {c["detail"].split()[4] for c in status["codes"] if c["code"] == "DATA_UNREACHABLE"}
    assert unreachable == silent and status["nodes_total"] == 8
    assert [n["node_id"] for n in client.nodes()["nodes"] if not n["reachable"]] == sorted(silent)


def test_a_caller_with_little_time_gets_what_came_back_until_then(address, world, monkeypatch):
    monkeypatch.setattr(admin_changes, "REPLY_S", 9.0)  # of the ten below: the way back may take long here
    world.hanging.add("node-1")
    with AdminClient(address, timeout_s=10.0) as hurried:
        assert [n["reachable"] for n in hurried.nodes()["nodes"]] == [True, False, True]
        assert {c["code"] for c in hurried.status()["codes"]} == {"DATA_UNREACHABLE", "REPLICA_SHORT"}
        assert hurried.replicas("gpt")["unreachable"] == ["node-1"]
    assert all(timeout_s < 1.3 for _, _, timeout_s in world.asked)


def test_without_a_leader_nobody_is_waited_for(client, world):
    world.has_leader = False
    world.lookups = 0
    assert client.status()["health"] == "CRITICAL"
    assert world.lookups == 0


def test_lost_memory_everywhere_is_critical(client, world):
    world.empty |= {"node-0", "node-1"}
    assert client.status()["health"] == "CRITICAL"


def test_a_step_replaced_while_the_nodes_were_asked_is_no_alarm(client, world):
    """Between the lookup and the listing two newer steps were committed: the nodes have dropped this one."""
    world.empty |= {"node-0", "node-1"}
    answered = world.lookup

    async def moved_on(request, timeout_s):
        response = await answered(request, timeout_s)
        world.kept_steps = [6, 7]
        return response

    world.lookup = moved_on
    assert client.status()["codes"] == []


def test_without_a_leader_status_still_answers(client, world):
    world.no_quorum()
    status = client.status()
    assert (status["health"], status["leader"]) == ("CRITICAL", None)
    assert [c["code"] for c in status["codes"]] == ["NO_QUORUM"]
    assert status["codes"][0]["do"]
    with pytest.raises(RegistryUnavailableError, match="start a majority"):
        client.jobs()


def test_an_unreachable_registry_is_not_called_a_replication_failure(client, world):
    world.registry_error = PeerError("node-0 did not answer")
    with pytest.raises(RegistryUnavailableError):
        client.checkpoints("gpt")


def test_a_step_that_is_not_kept(client):
    with pytest.raises(StepNotFoundError, match="step 99"):
        client.inspect("gpt", 99)


def test_a_bad_job_name_is_the_callers_mistake(client):
    with pytest.raises(InvalidArgumentError, match="not a valid name"):
        client.replicas("../etc")


def test_a_job_without_committed_steps_has_no_replicas(client, world):
    world.kept_steps = []
    assert client.replicas("gpt") == {"replicas": [], "unreachable": []}
    assert client.status()["health"] == "OK"


def test_history_says_who_became_what_and_why(client):
    found = client.history()["transitions"]
    assert [(t["node_id"], t["from"], t["to"]) for t in found] == [
        ("node-0", None, "UP"),
        ("node-9", None, "DOWN"),
        ("node-9", None, None),
    ]
    assert found[1] == {
        "at": "2025-06-15T15:06:40.124Z",
        "epoch": 6,
        "node_id": "node-9",
        "incarnation": 3,
        "from": None,
        "to": "DOWN",
        "reason": "refused by all who asked",
    }
    assert [t["epoch"] for t in client.history("node-9")["transitions"]] == [6, 7]
    assert [t["epoch"] for t in client.history(limit=1)["transitions"]] == [7]


def test_a_drain_begins_and_ends(client, world):
    assert client.drain("node-2") == {"node_id": "node-2", "draining": True}
    assert world.draining == {"node-2"}
    assert client.drain("node-2", undo=True)["draining"] is False
    assert world.draining == set()
    with pytest.raises(InvalidArgumentError, match="no node node-7"):
        client.drain("node-7")
    with pytest.raises(InvalidArgumentError, match="not a valid name"):
        client.drain("../x")


def test_a_verdict_has_its_reasons(client):
    assert client.safe_to_stop("node-1") == {
        "node_id": "node-1",
        "safe": False,
        "survivable": True,
        "reasons": ["2 shards of job gpt would have 1 copy, 2 are wanted"],
        "short_shards": 2,
        "lost_shards": 0,
        "jobs": ["gpt"],
    }


def test_a_node_that_is_not_down_is_not_forgotten(client, world):
    with pytest.raises(UnsafeError, match="not DOWN"):
        client.forget("node-2")
    world.states["node-2"] = registry_pb2.NODE_STATE_DOWN
    assert client.forget("node-2") == {"node_id": "node-2", "forgotten": True}
    assert len(client.nodes()["nodes"]) == 2


def test_verify_adds_up_what_the_nodes_found_and_names_the_silent_ones(world, address):
    world.bad = {"node-1": [common_pb2.ShardKey(job="gpt", step=5, rank=0, shard=2)]}
    world.refusing.add("node-2")
    with AdminClient(address, timeout_s=30) as client:
        assert client.verify("gpt", 5) == {
            "checked": 4,
            "checked_bytes": 2000,
            "bad": [{"node_id": "node-1", "job": "gpt", "step": 5, "rank": 0, "shard": 2}],
            "unreachable": ["node-2"],
        }
        client.verify("gpt")
    assert {(job, step) for _, job, step, _ in world.verified} == {("gpt", 5), ("gpt", None)}
    assert all(20 < timeout_s < 30 for *_, timeout_s in world.verified), (
        "as long as the caller waits, no longer"
    )


def test_a_node_that_hangs_does_not_cost_the_answer_of_a_verification(world, address):
    world.hanging.add("node-1")
    with AdminClient(address, timeout_s=2) as client:
        assert client.verify("gpt")["unreachable"] == ["node-1"]


def test_voters_and_another_one(client, world):
    assert client.voters()["voters"][1] == {
        "node_id": "node-1",
        "state": "UP",
        "leader": False,
        "address": "127.0.0.1:101",
        "answers": True,
        "version": 30,
    }
    assert client.replace_voter("node-1", "node-2", raft_address="h:9")["voters"][1] == {
        "node_id": "node-2",
        "registry_address": "node-2:1",
        "raft_address": "h:9",
    }
    assert [v["node_id"] for v in client.voters()["voters"]] == ["node-0", "node-2"]
    with pytest.raises(InvalidArgumentError, match="is no voter"):
        client.replace_voter("node-1", "node-2")
    assert [v["node_id"] for v in client.add_voters(["node-1"])["voters"]] == ["node-0", "node-2", "node-1"]
    with pytest.raises(InvalidArgumentError, match="as many addresses"):
        client.add_voters(["node-1"], raft_addresses=["a:1", "b:2"])


def test_a_voter_that_does_not_answer_is_not_up(client, world):
    world.mute.add("node-1")
    mute = client.voters()["voters"][1]
    assert (mute["state"], mute["answers"], mute["version"]) == ("SUSPECT", False, None)
    world.no_quorum()
    assert [(v["node_id"], v["state"], v["answers"]) for v in client.voters()["voters"]] == [
        ("node-0", None, False),
        ("node-1", None, False),
    ]
    with pytest.raises(RegistryUnavailableError, match="nothing was changed"):
        client.replace_voter("node-1", "node-2")


def test_without_what_the_leader_counts_status_still_answers(client, world):
    async def fails(request, timeout_s):
        raise PeerError("the leader is busy")

    world.get_redundancy = fails
    status = client.status()
    assert (status["health"], status["redundancy"]) == ("OK", None)


def test_nobody_at_the_address(tmp_path):
    with (
        AdminClient(f"unix://{tmp_path}/no.sock", timeout_s=2) as client,
        pytest.raises(DaemonUnavailableError, match="Is fastcheckd running there"),
    ):
        client.status()
    assert issubclass(DaemonUnavailableError, ConnectionError)


@contextlib.contextmanager
def slow_to_greet(address: str, delay_s: float) -> Iterator[str]:
    """Stands before a daemon as busy cores do: what it says first comes late."""
    host, _, port = address.rpartition(":")
    ended = threading.Event()

    def pass_on(source: socket.socket, sink: socket.socket, *, late: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if late:
                    ended.wait(delay_s)
                late = False
                sink.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection((host, int(port)))
                    for source, sink, late in ((near, far, False), (far, near, True)):
                        threading.Thread(
                            target=pass_on, args=(source, sink), kwargs={"late": late}, daemon=True
                        ).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)


def test_a_daemon_that_is_slow_to_greet_is_waited_for_as_long_as_for_an_answer(address):
    with slow_to_greet(address, 0.6) as behind, AdminClient(behind, timeout_s=20) as client:
        assert client.status()["health"] == "OK"
    with (
        slow_to_greet(address, 30) as behind,
        AdminClient(behind, timeout_s=0.3) as client,
        pytest.raises(DaemonUnavailableError),
    ):
        client.status()
