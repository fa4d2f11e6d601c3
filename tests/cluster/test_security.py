"""A cluster under TLS: it does its work, and every port refuses who shows no certificate, or the wrong one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import yaml
from tests.certificates import Authority
from tests.trainer_session import SpokenSession

from fastcheck import Checkpointer, DaemonUnavailableError, DeniedError
from fastcheck.admin import AdminClient
from fastcheck.certs import LocalAuthority
from fastcheck.local import LocalCluster
from fastcheck.security import SERVER_NAME, VARIABLES
from fastcheck_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    node_pb2,
    node_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("tls")) as made:
        made.up(3, tolerate=1, ram_budget="64MiB", tls=True)
        yield made


def config_of(cluster: LocalCluster, node_id: str) -> dict:
    return yaml.safe_load((cluster.dir / node_id / "config.yaml").read_text())


def cluster_id(cluster: LocalCluster) -> str:
    return config_of(cluster, "node-0")["cluster_id"]


def port_of(cluster: LocalCluster, node_id: str, key: str = "agent_port") -> str:
    return f"127.0.0.1:{config_of(cluster, node_id)[key]}"


def shows(monkeypatch: pytest.MonkeyPatch, cert: Path, ca: Path, server_name: str = "") -> None:
    """From now on this process has that certificate."""
    for variable, path in zip(VARIABLES, (cert, cert.with_suffix(".key"), ca), strict=True):
        monkeypatch.setenv(variable, str(path))
    monkeypatch.setenv(SERVER_NAME, server_name)


def shows_local(monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster, role: str) -> None:
    shows(monkeypatch, cluster.dir / "tls" / f"{role}-local.pem", cluster.dir / "tls" / "ca.pem")


def saved(address: str, job: str, step: int) -> dict:
    state = {"weights": torch.full((1000,), float(step))}
    with Checkpointer(job=job, rank=0, world_size=1, address=address) as ckpt:
        ckpt.save(step, state).result(timeout=60)
    return state


def test_a_job_commits_and_comes_back_near_and_far(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved(cluster.address("node-0"), "near", 1)
    into = {"weights": torch.zeros(1000)}
    with Checkpointer(job="near", rank=0, world_size=1, address=cluster.address("node-1")) as ckpt:
        assert ckpt.load(into) == 1
    assert torch.equal(into["weights"], state["weights"])
    shows_local(monkeypatch, cluster, "trainer")
    state = saved(port_of(cluster, "node-1"), "far", 2)
    with Checkpointer(job="far", rank=0, world_size=1, address=port_of(cluster, "node-2")) as ckpt:
        assert ckpt.load(into) == 2
    assert torch.equal(into["weights"], state["weights"])


def test_an_operator_asks_over_tcp_by_certificate_alone(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = port_of(cluster, "node-2")
    with (
        AdminClient(address) as client,
        pytest.raises(DaemonUnavailableError, match="set FASTCHECK_TLS_CERT"),
    ):
        client.status()
    shows_local(monkeypatch, cluster, "admin")
    with AdminClient(address) as client:
        status = client.status()
        assert status["nodes_up"] == 3
        assert {code["code"] for code in status["codes"]} == set()
        assert all(node["reachable"] and node["lane"]["tls"] for node in client.nodes()["nodes"])


@pytest.mark.parametrize("port", ["agent_port", "data_port", "registry"])
def test_every_port_refuses_strangers(cluster: LocalCluster, tmp_path: Path, port: str) -> None:
    config = config_of(cluster, "node-0")
    address = (
        config["voters"][0]["registry_address"] if port == "registry" else port_of(cluster, "node-0", port)
    )
    ca = (cluster.dir / "tls" / "ca.pem").read_bytes()
    cert, key = Authority(tmp_path).node(config["cluster_id"], "node-1")
    forged = grpc.ssl_channel_credentials(ca, key.read_bytes(), cert.read_bytes())
    bare = grpc.ssl_channel_credentials(ca)
    for channel in (
        grpc.insecure_channel(address),
        grpc.secure_channel(address, bare),
        grpc.secure_channel(address, forged),
    ):
        with channel, pytest.raises(grpc.RpcError) as refused:
            # Unknown there or not: before it was let in, nobody is told.
            admin_pb2_grpc.AdminServiceStub(channel).Status(admin_pb2.StatusRequest(), timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_failed_handshakes_do_not_fill_the_log(cluster: LocalCluster) -> None:
    def lines() -> int:
        return len(cluster.log_file("node-0").read_text().splitlines())

    before = lines()
    host, _, port = port_of(cluster, "node-0").rpartition(":")
    for _ in range(200):
        with (
            socket.create_connection((host, int(port)), timeout=60) as stranger,
            contextlib.suppress(OSError),
        ):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1 << 16):
                pass
    assert lines() - before < 50


def test_certificates_change_under_a_running_job(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All nodes get new ones, one of them is then killed and comes back, and the job goes on."""
    with contextlib.ExitStack() as stack:
        ckpt = stack.enter_context(
            Checkpointer(job="rotating", rank=0, world_size=1, address=cluster.address("node-0"))
        )
        state = {"weights": torch.ones(1000)}
        ckpt.save(1, state).result(timeout=60)
        authority = LocalAuthority(cluster.dir / "tls")
        for node_id in cluster.node_ids:
            for kind in ("pem", "key"):
                (cluster.dir / "tls" / f"node-{node_id}.{kind}").rename(tmp_path / f"{node_id}.{kind}")
            authority.node(node_id, ["127.0.0.1"], days=3)
        ckpt.save(2, state).result(timeout=60)
        cluster.kill("node-1")
        cluster.start("node-1")
        ckpt.save(3, state).result(timeout=60)
        shows_local(monkeypatch, cluster, "admin")
        with AdminClient(port_of(cluster, "node-1")) as client:
            assert client.status()["nodes_up"] == 3
    log = cluster.log_file("node-0").read_text()
    assert "the TLS files have changed" in log


@contextlib.contextmanager
def channel_as(cluster: LocalCluster, name: str, address: str, to: str) -> Iterator[grpc.Channel]:
    """A channel to node `to`, with a certificate that the cluster's own authority signed."""
    folder = cluster.dir / "tls"
    ca, key, cert = (folder / file for file in ("ca.pem", f"{name}.key", f"{name}.pem"))
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
    named = [("grpc.ssl_target_name_override", f"{to}.{cluster_id(cluster)}.fastcheck")]
    with grpc.secure_channel(address, credentials, options=named) as channel:
        yield channel


def denied(call: Any, *arguments: Any) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        answer = call(*arguments, timeout=60)
        if hasattr(answer, "__next__"):
            next(answer)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, refused.value
    return str(refused.value.details())


def test_nobody_makes_anothers_calls(cluster: LocalCluster) -> None:
    """A trainer is no node and no operator, an operator no node, a node no operator and no trainer."""
    config = config_of(cluster, "node-0")
    registry = config["voters"][0]["registry_address"]
    agent, data = port_of(cluster, "node-0"), port_of(cluster, "node-0", "data_port")
    job = trainer_pb2.ListStepsRequest(job="nobodys")
    for name in ("trainer-local", "admin-local"):
        with channel_as(cluster, name, registry, "node-0") as channel:
            voter = registry_pb2_grpc.RegistryServiceStub(channel)
            assert "role node" in denied(voter.Lookup, registry_pb2.LookupRequest(job="near"))
            assert "role node" in denied(voter.WatchView, registry_pb2.WatchViewRequest())
            assert "role node" in denied(voter.Heartbeat, iter([registry_pb2.HeartbeatRequest()]))
        with channel_as(cluster, name, data, "node-0") as channel:
            peer = peer_pb2_grpc.PeerServiceStub(channel)
            assert "role node" in denied(peer.ListReplicas, peer_pb2.ListReplicasRequest())
        with channel_as(cluster, name, agent, "node-0") as channel:
            node = node_pb2_grpc.NodeServiceStub(channel)
            assert "role node" in denied(node.BecomeVoter, node_pb2.BecomeVoterRequest())
    for name in ("trainer-local", "node-node-1"):
        with channel_as(cluster, name, agent, "node-0") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            request = admin_pb2.DrainRequest(node_id="node-1")
            assert "role admin" in denied(admin.Drain, request)
    with channel_as(cluster, "node-node-1", data, "node-0") as channel:
        assert "admin or trainer" in denied(trainer_pb2_grpc.TrainerServiceStub(channel).ListSteps, job)
    with channel_as(cluster, "trainer-local", data, "node-0") as channel:
        trainer_pb2_grpc.TrainerServiceStub(channel).ListSteps(job, timeout=60)


def test_a_node_speaks_for_no_other_node(cluster: LocalCluster) -> None:
    LocalAuthority(cluster.dir / "tls").node("node-9")  # of the cluster, and no voter: a voter may pass on
    config = config_of(cluster, "node-0")
    data = port_of(cluster, "node-0", "data_port")
    other = common_pb2.NodeRef(node_id="node-1", incarnation=1)
    for voter in config["voters"]:
        with channel_as(cluster, "node-node-9", voter["registry_address"], voter["node_id"]) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            assert "only for itself" in denied(stub.Leave, registry_pb2.LeaveRequest(node=other))
            beats = iter([registry_pb2.HeartbeatRequest(node=other, seq=1)])
            assert "only for itself" in denied(stub.Heartbeat, beats)
            request = registry_pb2.OpenRankRequest(job="near", world_size=1, client_id="x", node=other)
            assert "only for itself" in denied(stub.OpenRank, request)
    with channel_as(cluster, "node-node-9", data, "node-0") as channel:
        offer = peer_pb2.ReplicateRequest(
            cluster_id=config["cluster_id"], sources=[common_pb2.Holder(node=other)]
        )
        assert "only for itself" in denied(peer_pb2_grpc.PeerServiceStub(channel).Replicate, offer)
        opening = peer_pb2.OpenRequest(cluster_id=config["cluster_id"], reader="node-1")
        assert "only for itself" in denied(peer_pb2_grpc.PeerServiceStub(channel).Open, opening)


def test_the_sdk_says_who_was_refused_what(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    shows_local(monkeypatch, cluster, "trainer")
    with (
        AdminClient(port_of(cluster, "node-0")) as client,
        pytest.raises(DeniedError, match=r"trainer/local may not call .*AdminService/Status.*role admin"),
    ):
        client.status()


def test_a_job_is_its_owners_alone(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob, a local process and a wrong guess get nothing of Alice's job, and her next step commits."""
    folder = cluster.dir / "tls"
    for name in ("alice", "bob"):
        LocalAuthority(folder).trainer(name)
    address = port_of(cluster, "node-1")
    shows(monkeypatch, folder / "trainer-alice.pem", folder / "ca.pem")
    state = saved(address, "alices", 1)

    shows(monkeypatch, folder / "trainer-bob.pem", folder / "ca.pem")
    for where in (address, cluster.address("node-0")):
        into = {"weights": torch.zeros(1000)}
        with Checkpointer(job="alices", rank=0, world_size=1, address=where) as thief:
            with pytest.raises(DeniedError, match="belongs to trainer/alice"):
                thief.load(into)
            with pytest.raises(DeniedError, match="belongs to trainer/alice"):
                thief.steps()
            with pytest.raises(DeniedError, match="belongs to trainer/alice"):
                thief.save(2, state).result(timeout=60)
        assert not into["weights"].any()
    # What the SDK asks only after it has a session is refused without one as well.
    data = port_of(cluster, "node-1", "data_port")
    with channel_as(cluster, "trainer-bob", data, "node-1") as channel:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        rank = {"job": "alices", "rank": 0, "world_size": 1}
        target = trainer_pb2.UploadTarget(job="alices", session=99, segment_id="x")
        opening = trainer_pb2.OpenSession(**rank, client_id="thief", session=1)
        load = trainer_pb2.LoadRequest(**rank)
        for call, request in (
            (trainer.Upload, iter([trainer_pb2.UploadRequest(target=target)])),
            (trainer.Load, load),
            (trainer.Pull, trainer_pb2.PullRequest(load=load)),
            (trainer.Read, trainer_pb2.ReadRequest(job="alices", by_stream=True)),
            (trainer.ListSteps, trainer_pb2.ListStepsRequest(job="alices", allow_provisional=True)),
            (trainer.Session, iter([trainer_pb2.TrainerMessage(open=opening)])),
        ):
            assert "belongs to trainer/alice" in denied(call, request)
    with channel_as(cluster, "trainer-alice", data, "node-1") as alices:
        stub = trainer_pb2_grpc.TrainerServiceStub(alices)
        with SpokenSession(stub, "alices", "alice") as session:
            number = session.opened()
            segment = session.segment(4096)
            target = trainer_pb2.UploadTarget(job="alices", session=number, segment_id=segment.segment_id)
            with channel_as(cluster, "trainer-bob", data, "node-1") as channel:
                trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
                upload = iter([trainer_pb2.UploadRequest(target=target)])
                assert "belongs to trainer/alice" in denied(trainer.Upload, upload)

    shows(monkeypatch, folder / "trainer-alice.pem", folder / "ca.pem")
    with Checkpointer(job="alices", rank=0, world_size=1, address=address) as ckpt:
        assert ckpt.load(into) == 1
        ckpt.save(2, state).result(timeout=60)
    assert torch.equal(into["weights"], state["weights"])

    shows_local(monkeypatch, cluster, "admin")
    with Checkpointer(job="alices", rank=0, world_size=1, address=address) as operator:
        assert operator.load(into) == 2
    with AdminClient(address) as client:
        assert {job["job"]: job["owner"] for job in client.jobs()["jobs"]}["alices"] == "trainer/alice"


def test_what_a_local_process_began_is_no_remote_trainers(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(cluster.address("node-2"), "of-this-machine", 1)
    shows_local(monkeypatch, cluster, "trainer")
    with (
        Checkpointer(job="of-this-machine", rank=0, world_size=1, address=port_of(cluster, "node-0")) as ckpt,
        pytest.raises(DeniedError, match="belongs to local"),
    ):
        ckpt.load({"weights": torch.zeros(1000)})
