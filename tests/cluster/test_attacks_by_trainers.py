"""A trainer with a good certificate, who means no good: it gets nothing of another's job, and costs it nothing.

Alice and Bob are trainers of jobs of their own, on a cluster under TLS. Bob speaks the protocol as he likes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
import torch
import yaml
from tests.cluster.harness import TimedJob, process_of, until
from tests.trainer_session import SpokenSession, error_name

from fastcheck import Checkpointer
from fastcheck.admin import AdminClient
from fastcheck.certs import LocalAuthority
from fastcheck.local import LocalCluster
from fastcheck.security import SERVER_NAME, VARIABLES
from fastcheck_proto.conventions import RANK_MAX
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


def channel_of(
    cluster: LocalCluster, cert: Path, address: str, options: tuple[tuple[str, int], ...] = ()
) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        (cluster.dir / "tls" / "ca.pem").read_bytes(),
        cert.with_suffix(".key").read_bytes(),
        cert.read_bytes(),
    )
    return grpc.secure_channel(address, credentials, options=options)


@pytest.fixture
def bob(cluster: LocalCluster, certificates: dict[str, Path]) -> Iterator[TrainerServiceStub]:
    """Straight to a data process, from afar."""
    with channel_of(cluster, certificates["bob"], port_of(cluster, "node-0", "data_port")) as channel:
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


class Upload:
    """Bytes of Bob's that go on when he likes."""

    def __init__(self, stub: TrainerServiceStub, target: pb.UploadTarget) -> None:
        self._requests: queue.Queue[pb.UploadRequest | None] = queue.Queue()
        self.call = stub.Upload.future(iter(self._requests.get, None), timeout=60)
        self.send(target=target)

    def send(self, **part: object) -> None:
        self._requests.put(pb.UploadRequest(**part))

    def end(self) -> str:
        """The call's error, as the daemon names it; empty: it was taken."""
        self._requests.put(None)
        try:
            self.call.result()
        except grpc.RpcError as error:
            return error_name(error)
        return ""


def used_bytes(cluster: LocalCluster, node: str) -> int:
    with AdminClient(cluster.address(node), timeout_s=5) as admin:
        return next(int(n["ram_used_bytes"]) for n in admin.nodes()["nodes"] if n["node_id"] == node)


@pytest.mark.parametrize("guess", [1, 2, 3, 10**9])
@pytest.mark.usefixtures("alice")
def test_bytes_for_a_session_that_somebody_else_has_are_not_taken(cluster, bob, guess):
    """Bob guesses sessions of Alice's job, before it is hers and afterwards, and segments of it."""
    job = f"race-{guess}"
    target = pb.UploadTarget(job=job, session=guess, segment_id="0" * 32)
    early = Upload(bob, target)
    early.send(data=b"b" * MIB)
    with checkpointer(cluster, job) as ckpt:
        ckpt.save(1, state(1.0)).result(timeout=60)
        early.send(data=b"b" * MIB)
        late = Upload(bob, target)
        late.send(data=b"b" * MIB)
        for upload in (early, late):
            assert upload.end() in {"ERROR_CODE_FENCED", "ERROR_CODE_DENIED"}
        ckpt.save(2, state(2.0)).result(timeout=60)
        into = state(0.0)
        assert ckpt.load(into) == 2 and torch.equal(into["x"], state(2.0)["x"])


@pytest.mark.usefixtures("alice")
def test_a_session_is_its_owners_alone_and_takes_no_memory_when_it_is_over(cluster, bob):
    before = used_bytes(cluster, "node-0")
    with SpokenSession(bob, "bobs", "bob") as own:
        own.opened()
        own.segment(8 * MIB)
    until(lambda: used_bytes(cluster, "node-0") <= before + MIB, "no memory to be taken")
    with checkpointer(cluster, "alices") as ckpt:
        ckpt.save(1, state(1.0)).result(timeout=60)
        for number in (0, 1, 10**6):
            with SpokenSession(bob, "alices", "bob", session=number, again=bool(number)) as thief:
                assert thief.hear("opened") is None
                assert thief.ended == "ERROR_CODE_DENIED"
        ckpt.save(2, state(2.0)).result(timeout=60)


@pytest.mark.usefixtures("alice")
def test_an_upload_of_an_earlier_process_of_the_rank_writes_into_nothing_of_the_next_ones(
    cluster, certificates
):
    """The same trainer's own earlier call, which a network held up, goes on after the rank was taken over."""
    address = port_of(cluster, "node-0", "data_port")
    with channel_of(cluster, certificates["alice"], address) as channel:
        stub = TrainerServiceStub(channel)
        size = 4 * MIB
        with SpokenSession(stub, "zombie", "first") as first:
            number = first.opened()
            segment = first.segment(size)
            target = pb.UploadTarget(job="zombie", session=number, segment_id=segment.segment_id)
            upload = Upload(stub, target)
            upload.send(data=b"z" * (size // 2))
            big = {"x": torch.full((size // 4 - 100,), 5.0)}
            with checkpointer(cluster, "zombie") as ckpt:
                handles = []
                for step in (1, 2, 3):
                    handles.append(ckpt.save(step, big))
                    upload.send(data=b"z" * (size // 16))
                assert first.hear("fenced") is not None
                first.say(
                    sealed=pb.Sealed(segment_id=segment.segment_id, step=9, state_bytes=size, header_bytes=1)
                )
                for handle in handles:
                    handle.result(timeout=60)
                assert upload.end() == "ERROR_CODE_FENCED"
                into = {"x": torch.zeros(size // 4 - 100)}
                assert ckpt.load(into) == 3 and torch.equal(into["x"], big["x"])
            assert first.refusal() in {"ERROR_CODE_FENCED", "ERROR_CODE_NOT_FOUND"}


@contextlib.contextmanager
def peak_bytes(cluster: LocalCluster, node: str) -> Iterator[Callable[[], int]]:
    """Growth of the memory of any one of a node's processes meanwhile, without what it maps of the store."""
    processes = [psutil.Process(pid) for pid in cluster.pids(node)]

    def private() -> list[int]:
        return [p.memory_info().rss - p.memory_info().shared for p in processes]

    before, most, over = private(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            most.append(max(now - was for now, was in zip(private(), before, strict=True)))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield lambda: max(most)
    finally:
        over.set()
        watching.join()


def field(number: int, body: bytes) -> bytes:
    """A length-delimited field of a message."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


#: A little less than a data process takes of one request.
REQUEST_BYTES = 15 * MIB
EMPTY = {number: field(number, b"") for number in (1, 2, 3, 21)}
_LAYOUTS = {
    "chunks": EMPTY[2] * (REQUEST_BYTES // 2),
    "runs": field(2, EMPTY[2] * (REQUEST_BYTES // 2)),
    "optimizer steps": EMPTY[3] * (REQUEST_BYTES // 2),
}
BOBS = 4


def opening(rank: int) -> bytes:
    """The first message of a session; one with the same client and rank would end the one before it."""
    session = pb.OpenSession(job="swollen", rank=rank, world_size=BOBS, client_id="bob")
    return pb.TrainerMessage(open=session).SerializeToString()


#: Stands for the opening of the rank that each caller is.
_OPENING = opening(0)
#: Method → what it is sent; of a stream, each message.
SWOLLEN: dict[str, tuple[str, list[bytes]]] = {
    # A layout is field 6 of `sealed`, which is field 3 of the message; digests are its field 8.
    **{
        f"Session, {what}": ("Session", [_OPENING, field(3, field(6, layout))])
        for what, layout in _LAYOUTS.items()
    },
    "Session, first": ("Session", [field(3, field(8, b"") * (REQUEST_BYTES // 3))]),
    "Read, ranks": ("Read", [field(1, b"swollen") + EMPTY[3] * (REQUEST_BYTES // 2)]),
    "Read, ranges": ("Read", [field(1, b"swollen") + field(3, EMPTY[2] * (REQUEST_BYTES // 2))]),
    "ListSteps, unknown fields": ("ListSteps", [EMPTY[21] * (REQUEST_BYTES // 3)]),
}


@pytest.mark.usefixtures("alice")
def test_what_is_small_on_the_wire_and_large_once_parsed_takes_bounded_memory(cluster, certificates):
    """Megabytes of empty elements, and zeros that gzip makes a thousand times smaller, several at once at each port."""
    config = yaml.safe_load((cluster.dir / "node-0" / "config.yaml").read_text())
    registry = next(v["registry_address"] for v in config["voters"] if v["node_id"] == "node-0")
    addresses = [port_of(cluster, "node-0", "data_port"), port_of(cluster, "node-0", "agent_port"), registry]

    def say(address: str, method: str, data: list[bytes], compression: grpc.Compression) -> grpc.StatusCode:
        options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        with channel_of(cluster, certificates["bob"], address, options) as channel:
            try:
                if method.endswith("/Session"):
                    list(channel.stream_stream(method)(iter(data), timeout=60, compression=compression))
                else:
                    channel.unary_unary(method)(data[0], timeout=60, compression=compression)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    def say_at_once(
        address: str, method: str, data: list[bytes], compression: grpc.Compression
    ) -> set[grpc.StatusCode]:
        calls = [
            (address, method, [opening(rank), *data[1:]] if data[0] is _OPENING else data, compression)
            for rank in range(BOBS)
        ]
        with ThreadPoolExecutor(BOBS) as bobs:
            return set(bobs.map(say, *zip(*calls, strict=True)))

    refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    pids = cluster.pids("node-0")
    with checkpointer(cluster, "beside-parsing") as ckpt:
        ckpt.save(1, state(1.0)).result(timeout=60)
        with peak_bytes(cluster, "node-0") as grown:
            for what, (method, data) in SWOLLEN.items():
                path = f"/fastcheck.v1.TrainerService/{method}"
                codes = say_at_once(addresses[0], path, data, grpc.Compression.NoCompression)
                assert codes <= refused, (what, codes)
            for address in addresses:
                for method in (
                    "/fastcheck.v1.TrainerService/Session",
                    "/fastcheck.v1.NodeService/Describe",
                ):
                    codes = say_at_once(address, method, [bytes(60 * MIB)], grpc.Compression.Gzip)
                    assert codes <= {*refused, grpc.StatusCode.UNIMPLEMENTED}, (address, method, codes)
        ckpt.save(2, state(2.0)).result(timeout=60)
    assert cluster.pids("node-0") == pids
    # One of 15 MiB is parsed at a time, at fifty times its size.
    assert grown() < 1200 * MIB


#: What Alice's commit may take once an attack is over, against before it: that much, and 10 ms.
AFTER = 1.5
#: And while it lasts, on the machine that the attacker uses too: a commit never waits for the attack to end.
DURING_S = 3.0


def in_registry(cluster: LocalCluster) -> tuple[int, int]:
    """Private memory of the voters' registry processes, and bytes of their folders on disk, the largest of each."""
    processes = [process_of(cluster, node, "registry").memory_info() for node in cluster.node_ids]
    folders = [cluster.dir / node for node in cluster.node_ids]
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    files = [[f for f in Path(config["state_dir"]).rglob("*") if f.is_file()] for config in configs]
    return max(p.rss - p.shared for p in processes), max(
        sum(f.stat().st_size for f in each) for each in files
    )


@pytest.mark.alone
@pytest.mark.usefixtures("alice")
def test_thousands_of_ranks_cost_another_ones_commits_nothing_once_they_are_there(cluster, bob):
    """FASTCHECK_ATTACK_RANKS=30000: as many as a job may have. A larger world is refused."""
    count = int(os.environ.get("FASTCHECK_ATTACK_RANKS", "1200"))
    for world_size, says in ((RANK_MAX + 1, str(RANK_MAX)), (2**32 - 1, str(RANK_MAX))):
        with SpokenSession(bob, "vast", "b", rank=RANK_MAX, world_size=world_size) as refused:
            assert refused.hear("opened") is None
        assert refused.ended == "ERROR_CODE_INVALID" and says in refused.details

    def open_one(rank: int) -> None:
        with SpokenSession(bob, "vast", f"b{rank}", rank=rank, world_size=RANK_MAX) as session:
            session.opened()

    with Checkpointer("beside-ranks", rank=0, world_size=1, address=port_of(cluster, "node-1")) as ckpt:
        alice = TimedJob(ckpt)
        before_s, (memory, disk) = alice.median_s(), in_registry(cluster)
        with ThreadPoolExecutor(4) as bobs:
            opening = [bobs.submit(open_one, rank) for rank in range(count)]
            during = []
            while not all(each.done() for each in opening):
                during.append(alice.commit_s())
            for each in opening:
                each.result()
        assert statistics.median(during) < DURING_S
        after_s = alice.median_at_most_s(AFTER * before_s + 0.01)
        assert after_s <= AFTER * before_s + 0.01, (before_s, statistics.median(during), after_s)
    more_memory, more_disk = in_registry(cluster)
    assert more_memory - memory < 16 * MIB + count * 2048
    assert more_disk - disk < MIB + count * 1024
