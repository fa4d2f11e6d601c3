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

from fastcheck import Checkpointer
from fastcheck.admin import AdminClient
from fastcheck.certs import LocalAuthority
from fastcheck.local import LocalCluster
from fastcheck.security import SERVER_NAME, VARIABLES
from fastcheck_proto.conventions import ERROR_METADATA_KEY, RANK_MAX
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
    address = port_of(cluster, "node-0", "data_port")
    with channel_of(cluster, certificates["alice"], address) as channel:
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
    "chunks": field(3, EMPTY[2] * (REQUEST_BYTES // 2)),
    "runs": field(3, field(2, EMPTY[2] * (REQUEST_BYTES // 2))),
    "optimizer steps": field(3, EMPTY[3] * (REQUEST_BYTES // 2)),
    "digests": EMPTY[21] * (REQUEST_BYTES // 3),
}
_BEGIN = begin("swollen", 1, step=1).SerializeToString()
SWOLLEN = {
    **{f"BeginSave, {what}": ("BeginSave", _BEGIN + field(8, layout)) for what, layout in _LAYOUTS.items()},
    "SealSave, optimizer steps": ("SealSave", field(4, EMPTY[3] * (REQUEST_BYTES // 2))),
    "Read, ranks": ("Read", field(1, b"swollen") + EMPTY[3] * (REQUEST_BYTES // 2)),
    "Read, ranges": ("Read", field(1, b"swollen") + field(3, EMPTY[2] * (REQUEST_BYTES // 2))),
    "ListSteps, unknown fields": ("ListSteps", EMPTY[21] * (REQUEST_BYTES // 3)),
}


@pytest.mark.usefixtures("alice")
def test_what_is_small_on_the_wire_and_large_once_parsed_takes_bounded_memory(cluster, certificates):
    """Megabytes of empty elements, and zeros that gzip makes a thousand times smaller, several at once at each port."""
    config = yaml.safe_load((cluster.dir / "node-0" / "config.yaml").read_text())
    registry = next(v["registry_address"] for v in config["voters"] if v["node_id"] == "node-0")
    addresses = [port_of(cluster, "node-0", "data_port"), port_of(cluster, "node-0", "agent_port"), registry]

    def say(address: str, method: str, data: bytes, compression: grpc.Compression) -> grpc.StatusCode:
        options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        with channel_of(cluster, certificates["bob"], address, options) as channel:
            try:
                channel.unary_unary(method)(data, timeout=60, compression=compression)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    def say_at_once(
        address: str, method: str, data: bytes, compression: grpc.Compression
    ) -> set[grpc.StatusCode]:
        with ThreadPoolExecutor(4) as bobs:
            return set(bobs.map(say, *zip(*[(address, method, data, compression)] * 4, strict=True)))

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
                    "/fastcheck.v1.TrainerService/BeginSave",
                    "/fastcheck.v1.NodeService/Describe",
                ):
                    codes = say_at_once(address, method, bytes(60 * MIB), grpc.Compression.Gzip)
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
        with pytest.raises(grpc.RpcError) as refused:
            bob.OpenSession(
                pb.OpenSessionRequest(job="vast", rank=RANK_MAX, world_size=world_size, client_id="b"),
                timeout=20,
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and says in refused.value.details()

    def open_one(rank: int) -> None:
        request = pb.OpenSessionRequest(job="vast", rank=rank, world_size=RANK_MAX, client_id=f"b{rank}")
        bob.OpenSession(request, timeout=60, wait_for_ready=True)

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
