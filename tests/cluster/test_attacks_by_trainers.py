"""A trainer with a good certificate, who means no good: it gets nothing of another's job, and costs it nothing.

Alice and Bob are trainers of jobs of their own, on a cluster under TLS. Bob speaks the protocol as he likes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
import yaml
from tests.cluster.harness import until

from fastcheck import Checkpointer
from fastcheck.admin import AdminClient
from fastcheck.certs import LocalAuthority
from fastcheck.local import LocalCluster
from fastcheck.security import SERVER_NAME, VARIABLES
from fastcheck_proto.conventions import ERROR_METADATA_KEY
from fastcheck_proto.v1 import trainer_pb2 as pb
from fastcheck_proto.v1.trainer_pb2_grpc import TrainerServiceStub

MIB = 1 << 20
JOB_BUDGET = 24 * MIB


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("bob") / "cluster") as made:
        made.up(3, ram_budget="96MiB", tls=True, settings={"job_budget_bytes": JOB_BUDGET})
        yield made


def port_of(cluster: LocalCluster, node: str, key: str = "agent_port") -> str:
    config = yaml.safe_load((cluster.dir / node / "config.yaml").read_text())
    return f"127.0.0.1:{config[key]}"


@pytest.fixture(scope="module")
def certificates(cluster: LocalCluster) -> dict[str, Path]:
    authority = LocalAuthority(cluster.dir / "tls")
    return {name: authority.trainer(name) for name in ("alice", "bob")}


@pytest.fixture
def bob(cluster: LocalCluster, certificates: dict[str, Path]) -> Iterator[TrainerServiceStub]:
    """Straight to a data process, from afar."""
    cert = certificates["bob"]
    credentials = grpc.ssl_channel_credentials(
        (cluster.dir / "tls" / "ca.pem").read_bytes(),
        cert.with_suffix(".key").read_bytes(),
        cert.read_bytes(),
    )
    with grpc.secure_channel(port_of(cluster, "node-0", "data_port"), credentials) as channel:
        yield TrainerServiceStub(channel)


@pytest.fixture
def alice(
    cluster: LocalCluster, certificates: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """This process shows Alice's certificate."""
    cert = certificates["alice"]
    paths = (cert, cert.with_suffix(".key"), cluster.dir / "tls" / "ca.pem")
    for variable, path in zip(VARIABLES, paths, strict=True):
        monkeypatch.setenv(variable, str(path))
    monkeypatch.setenv(SERVER_NAME, "")
    yield


def checkpointer(cluster: LocalCluster, job: str) -> Checkpointer:
    return Checkpointer(job, rank=0, world_size=1, address=port_of(cluster, "node-0"))


def state(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((MIB // 4,), value)}


class Push:
    """A stream of Bob's that goes on when he likes."""

    def __init__(self, stub: TrainerServiceStub, begin: pb.BeginSaveRequest) -> None:
        self._requests: queue.Queue[pb.PushRequest | None] = queue.Queue()
        self.call = stub.Push.future(iter(self._requests.get, None), timeout=60)
        self.send(begin=begin)

    def send(self, **part: object) -> None:
        self._requests.put(pb.PushRequest(**part))

    def end(self) -> str:
        """The stream's error, as the daemon names it; empty: it was taken."""
        self._requests.put(None)
        try:
            self.call.result()
        except grpc.RpcError as error:
            return dict(tuple(error.trailing_metadata() or ())).get(ERROR_METADATA_KEY, str(error))
        return ""


def begin(job: str, session: int, step: int, size: int = MIB, rank: int = 0) -> pb.BeginSaveRequest:
    return pb.BeginSaveRequest(job=job, rank=rank, world_size=1, session=session, step=step, state_bytes=size)


def used_bytes(cluster: LocalCluster, node: str) -> int:
    with AdminClient(cluster.address(node), timeout_s=5) as admin:
        return next(int(n["ram_used_bytes"]) for n in admin.nodes()["nodes"] if n["node_id"] == node)


@pytest.mark.parametrize("guess", [1, 2, 3, 10**9])
@pytest.mark.usefixtures("alice")
def test_a_push_begun_before_a_job_was_somebodys_is_not_taken_afterwards(cluster, bob, guess):
    """Bob begins to push a job that nobody has, with a session that he guesses, and seals it when Alice has it."""
    job = f"race-{guess}"
    push = Push(bob, begin(job, guess, step=1000))
    push.send(data=b"b" * MIB)
    threading.Event().wait(0.3)  # what he has begun is there before Alice comes, if it is let in at all
    with checkpointer(cluster, job) as ckpt:
        ckpt.save(1, state(1.0)).result(timeout=60)
        push.send(seal=pb.PushSeal(header_offset=0, header_bytes=10))
        assert push.end() in {"ERROR_CODE_FENCED", "ERROR_CODE_DENIED"}
        ckpt.save(2, state(2.0)).result(timeout=60)
        into = state(0.0)
        assert ckpt.load(into) == 2 and torch.equal(into["x"], state(2.0)["x"])


@pytest.mark.usefixtures("alice")
def test_sessions_that_nobody_opened_fence_no_later_owner_and_take_no_memory(cluster, bob):
    before = used_bytes(cluster, "node-0")
    for number in range(12):
        with pytest.raises(grpc.RpcError) as refused:
            bob.BeginSave(begin(f"unheard-{number}", 10**6, step=1, size=8 * MIB), timeout=20)
        trailing = dict(tuple(refused.value.trailing_metadata() or ()))
        assert trailing[ERROR_METADATA_KEY] in {"ERROR_CODE_FENCED", "ERROR_CODE_DENIED"}
    until(lambda: used_bytes(cluster, "node-0") <= before + MIB, "no memory to be taken")
    with checkpointer(cluster, "unheard-3") as ckpt:
        ckpt.save(1, state(1.0)).result(timeout=60)
    with pytest.raises(grpc.RpcError) as refused:
        bob.BeginSave(begin("unheard-3", 1, step=2), timeout=20)
    assert dict(tuple(refused.value.trailing_metadata()))[ERROR_METADATA_KEY] == "ERROR_CODE_DENIED"


@pytest.mark.usefixtures("alice")
def test_a_push_of_an_earlier_process_of_the_rank_writes_into_nothing_of_the_next_ones(cluster, certificates):
    """The same trainer's own earlier stream, which a network held up, goes on after the rank was taken over."""
    cert = certificates["alice"]
    credentials = grpc.ssl_channel_credentials(
        (cluster.dir / "tls" / "ca.pem").read_bytes(),
        cert.with_suffix(".key").read_bytes(),
        cert.read_bytes(),
    )
    with grpc.secure_channel(port_of(cluster, "node-0", "data_port"), credentials) as channel:
        stub = TrainerServiceStub(channel)
        opened = stub.OpenSession(
            pb.OpenSessionRequest(job="zombie", rank=0, world_size=1, client_id="first"), timeout=20
        )
        size = 4 * MIB
        push = Push(stub, begin("zombie", opened.session, step=1, size=size))
        push.send(data=b"z" * (size // 2))
        big = {"x": torch.full((size // 4 - 100,), 5.0)}
        with checkpointer(cluster, "zombie") as ckpt:
            handles = []
            for step in (1, 2, 3):
                handles.append(ckpt.save(step, big))
                push.send(data=b"z" * (size // 16))
            for handle in handles:
                handle.result(timeout=60)
            assert push.end() == "ERROR_CODE_FENCED"
            into = {"x": torch.zeros(size // 4 - 100)}
            assert ckpt.load(into) == 3 and torch.equal(into["x"], big["x"])
