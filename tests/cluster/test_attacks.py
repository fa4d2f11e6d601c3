"""Attacks on the ports and the files of a real daemon: it lives, says so once, and others' steps commit.

Which threat each one is, and what is attacked elsewhere, is in docs/security.md. The cluster has no certificates, so
that whoever means no good gets as far as possible; strangers at ports with certificates are in `test_security.py`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from tests import http2
from tests.cluster.harness import Job, counters, leader, node_states, process_of, replicas_on_disk, until
from tests.trainer_session import SpokenSession

from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster
from fastcheck_proto.v1 import (
    admin_pb2,
    common_pb2,
    node_pb2,
    peer_pb2,
    peer_pb2_grpc,
    registry_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
)
from fastcheckd.transfer.frames import FrameHeader, Hello, Kind, pack_frame, pack_hello

VICTIM = "node-1"
#: A node may say about an attack this much, however long it lasts.
LINES_MAX = 60
#: Calls that are taken cost what they cost, a thousand at once on a connection; what is only announced is gigabytes.
RSS_MAX = 256 << 20
#: All ports end who says nothing after 5 or 10 s.
SILENCE_S_MAX = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("attacks")) as made:
        made.up(3, tolerate=1, ram_budget="128MiB", settings={"keep_steps": 2})
        yield made


def config_of(cluster: LocalCluster, node: str = VICTIM) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((cluster.dir / node / "config.yaml").read_text())
    return config


def ports_of(cluster: LocalCluster) -> dict[str, int]:
    """The victim's TCP ports by what they are for."""
    config = config_of(cluster)
    voter = next(v for v in config["voters"] if v["node_id"] == VICTIM)
    addresses = {"registry": voter["registry_address"], "raft": voter["raft_address"]}
    if config["metrics_address"]:
        addresses["metrics"] = config["metrics_address"]
    ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}
    return ports | {name: config[f"{name}_port"] for name in ("agent", "data", "lane")}


def rss(cluster: LocalCluster) -> int:
    """Private memory of the victim's processes; what they map of the store is not theirs."""
    processes = [psutil.Process(pid) for pid in cluster.pids(VICTIM)]
    return sum(p.memory_info().rss - p.memory_info().shared for p in processes)


@contextlib.contextmanager
def unharmed(cluster: LocalCluster, job: str) -> Iterator[Callable[[], None]]:
    """What is done inside harms nobody; gives what commits a step of a job that the victim, too, has a rank of."""
    ranks = Job(cluster, ["node-0", VICTIM], name=job, megabytes=0.5)
    step = iter(range(1, 1000))
    try:
        ranks.commit(next(step))
        pids, memory = cluster.pids(VICTIM), rss(cluster)
        said = len(cluster.log_file(VICTIM).read_text().splitlines())
        yield lambda: ranks.commit(next(step))
        ranks.commit(last := next(step))
        assert ranks.load() == last
    finally:
        ranks.stop()
    assert cluster.pids(VICTIM) == pids, "a process ended"
    assert rss(cluster) - memory < RSS_MAX
    log = cluster.log_file(VICTIM).read_text()
    assert "Traceback" not in log
    new = log.splitlines()[said:]
    assert len(new) < LINES_MAX, "\n".join(new)


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


class _Owned:
    """Makes a file, if somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def raft_frame(value: object) -> bytes:
    data = zlib.compress(pickle.dumps(value))
    return struct.pack("i", len(data)) + data


def hostile_words(owned: Path) -> dict[str, bytes]:
    """What strangers say first, at whichever port."""
    stride = Hello(bytes(32))
    chunk = FrameHeader(kind=Kind.DATA, raw_bytes=16 << 20, encoded_bytes=16 << 20)
    return {
        "nothing, and leaves": b"",
        "noise": os.urandom(70_000),
        "a frame of 16 MiB": http2.GREETING + http2.frame(http2.DATA, 0, 1, b"x", announced=(1 << 24) - 1),
        "a head of 16 MiB": http2.GREETING + http2.frame(http2.HEADERS, 0, 1, b"x", announced=(1 << 24) - 1),
        "a message of 4 GiB": http2.GREETING
        + http2.call("/fastcheck.v1.NodeService/Describe")
        + http2.message(b"x" * 100, announced=2**32 - 1),
        "two thousand calls": http2.GREETING
        + b"".join(http2.call("/fastcheck.v1.NodeService/Describe", 2 * n + 1) for n in range(2000)),
        "a TLS hello": b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(0x3FF0),
        "a chunk without a ticket": pack_hello(stride) + pack_frame(chunk) + bytes(1000),
        "a raft message of 2 GiB": struct.pack("i", 2**31 - 1) + bytes(70_000),
        "a negative raft message": struct.pack("i", -1) + bytes(100),
        "a malicious pickle": raft_frame(_Owned(owned)),
        "a malicious pickle, bare": pickle.dumps(_Owned(owned)),
        "an endless HTTP head": b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 70_000,
    }


def test_what_strangers_say_at_any_port_is_read_within_bounds(cluster: LocalCluster, tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    with unharmed(cluster, "beside-noise") as commit:
        for port in ports_of(cluster).values():
            for words in hostile_words(owned).values():
                for _ in range(3):
                    with contextlib.suppress(OSError), dial(port) as sock:
                        sock.sendall(words)
                        sock.settimeout(0.02)
                        sock.recv(1 << 16)
            commit()
        assert not owned.exists(), "a pickle was believed"


def test_who_is_silent_or_drips_is_sent_away_from_every_port(cluster: LocalCluster) -> None:
    beginnings = {
        "lane": pack_hello(Hello(bytes(32))),
        "raft": raft_frame("x" * 3000),
        "metrics": b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 8000,
    }
    with unharmed(cluster, "beside-silence") as commit, contextlib.ExitStack() as stack:
        waiting: dict[str, tuple[socket.socket, Iterator[bytes]]] = {}
        for name, port in ports_of(cluster).items():
            words = beginnings.get(name, http2.GREETING)[:-1]
            for how, bytes_ in (("silent", b""), ("dripping", words)):
                sock = stack.enter_context(dial(port))
                sock.setblocking(False)
                waiting[f"{name}, {how}"] = sock, iter([bytes_[at : at + 1] for at in range(len(bytes_))])
        since = time.monotonic()
        while waiting:
            assert time.monotonic() - since < SILENCE_S_MAX, f"still there: {sorted(waiting)}"
            for _ in range(20):
                for name, (sock, words_left) in list(waiting.items()):
                    if is_gone(sock, next(words_left, b"")):
                        del waiting[name]
                time.sleep(0.1)
            commit()


def is_gone(sock: socket.socket, byte: bytes) -> bool:
    try:
        sock.send(byte)
        return sock.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_ten_thousand_idle_connections_cost_one_port_and_nobody_elses_steps(cluster: LocalCluster) -> None:
    """As many as this process may have. They greet first, so that they are not sent away for their silence."""
    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, allowed - 500)
    data, port = process_of(cluster, VICTIM, "data"), ports_of(cluster)["data"]
    most = min(8192, hard // 4)
    assert count > most, "or nothing is attacked"

    def said() -> int:
        return cluster.log_file(VICTIM).read_text().count("turns others away")

    logged = said()
    with unharmed(cluster, "beside-a-crowd") as commit:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    sock = stack.enter_context(socket.socket())
                    sock.settimeout(2)
                    sock.connect(("127.0.0.1", port))
                    sock.sendall(http2.GREETING)
            until(lambda: said() == logged + 1, "the daemon to say that the port is full")
            assert most <= data.num_fds() < most + 500, "the rest of the descriptors is for others"
            commit()
            commit()
        until(lambda: data.num_fds() < 300, "the crowd's descriptors to come back", timeout_s=60)
    assert said() == logged + 1


def string_fields(of: Descriptor, depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Paths to all text in a message: field after field."""
    for field in of.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (field.name,)
        elif field.message_type and not field.message_type.GetOptions().map_entry and depth < 4:
            for rest in string_fields(field.message_type, depth + 1):
                yield (field.name, *rest)


def with_text(of: Descriptor, path: tuple[str, ...], text: str) -> Any:
    """A message in which one field is that text."""
    message = GetMessageClass(of)()
    at = message
    for name in path[:-1]:
        repeated = at.DESCRIPTOR.fields_by_name[name].is_repeated
        at = getattr(at, name).add() if repeated else getattr(at, name)
    if at.DESCRIPTOR.fields_by_name[path[-1]].is_repeated:
        getattr(at, path[-1]).append(text)
    else:
        setattr(at, path[-1], text)
    return message


def test_no_text_of_a_request_leaves_the_store(cluster: LocalCluster, tmp_path: Path) -> None:
    ports = ports_of(cluster)
    first = leader(cluster, "node-0")
    decides = next(v for v in config_of(cluster)["voters"] if v["node_id"] == first)["registry_address"]
    served = {
        f"127.0.0.1:{ports['agent']}": [admin_pb2, node_pb2],
        f"127.0.0.1:{ports['data']}": [peer_pb2, trainer_pb2],
        decides: [registry_pb2],
    }
    name = f"owned-{secrets.token_hex(8)}"
    texts = (
        f"../../{name}", f"../../../../../../../..{tmp_path}/{name}", f"{tmp_path}/{name}", "..", f"\0{name}",
        f"\r\n{name}",
    )  # fmt: skip
    asked = 0
    with unharmed(cluster, "beside-paths") as commit:
        for address, modules in served.items():
            with grpc.insecure_channel(address) as channel:
                services = [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]
                for method in (m for s in services if s.name != "DataControlService" for m in s.methods):
                    for path in string_fields(method.input_type):
                        for text in texts:
                            code = outcome(channel, method, with_text(method.input_type, path, text))
                            assert code not in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}, (
                                method,
                                path,
                            )
                            asked += 1
        commit()
        for job in (*texts, ".", "", "a/b"):
            for call, request in opening(ports["data"], job):
                with pytest.raises(grpc.RpcError) as refused:
                    answer = call(request, timeout=60)
                    if hasattr(answer, "__next__"):
                        next(answer)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (job, request)
    assert asked > 200
    config = config_of(cluster)
    folders = [
        tmp_path,
        cluster.dir,
        *(Path(config[key]).parent for key in ("ram_dir", "runtime_dir", "state_dir")),
    ]
    made = [found for folder in folders for found in folder.rglob(f"*{name}*")]
    assert not made + [
        found for folder in ("/", "/tmp", "/dev/shm") for found in Path(folder).glob(f"*{name}*")
    ]


def opening(port: int, job: str) -> list[tuple[Any, Any]]:
    """The calls that make files of a job."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    trainer, peer = trainer_pb2_grpc.TrainerServiceStub(channel), peer_pb2_grpc.PeerServiceStub(channel)
    rank = {"job": job, "rank": 0, "world_size": 1}
    key = common_pb2.ShardKey(job=job)
    return [
        (trainer.Session, iter([trainer_pb2.TrainerMessage(open={**rank, "client_id": "x"})])),
        (trainer.Upload, iter([trainer_pb2.UploadRequest(target={"job": job})])),
        (peer.ReportCorrupt, peer_pb2.ReportCorruptRequest(key=key)),
    ]


def outcome(channel: grpc.Channel, method: Any, request: Any) -> grpc.StatusCode:
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    data = request.SerializeToString()
    try:
        answer = getattr(channel, kind)(path)(iter([data]) if method.client_streaming else data, timeout=0.3)
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_huge_sizes_are_refused_before_there_is_memory_for_them(cluster: LocalCluster) -> None:
    config, ports = config_of(cluster), ports_of(cluster)
    with unharmed(cluster, "beside-giants") as commit, contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{ports['data']}"))
        peer = peer_pb2_grpc.PeerServiceStub(channel)
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        with AdminClient(cluster.address("node-0"), timeout_s=10) as admin:
            node = next(n for n in admin.nodes()["nodes"] if n["node_id"] == VICTIM)
        owner = common_pb2.NodeRef(node_id="node-0", incarnation=1)
        for huge in (1 << 40, 2**62, 2**63):
            offer = peer_pb2.ReplicateRequest(
                cluster_id=config["cluster_id"], epoch=10**6, holder_incarnation=node["incarnation"],
                key=common_pb2.ShardKey(job="giant", step=1), digest=bytes(16), bytes=huge,
                sources=[common_pb2.Holder(node=owner)],
            )  # fmt: skip
            with pytest.raises(grpc.RpcError) as refused:
                peer.Replicate(offer, timeout=60)
            assert refused.value.code() in {
                grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT,
            }, refused.value  # fmt: skip
            with SpokenSession(trainer, "giant", f"giant-{huge}") as session:
                session.opened()
                session.say(reserve=trainer_pb2.ReserveMemory(state_bytes=huge, step=1))
                assert session.refusal() in {"ERROR_CODE_OVER_BUDGET", "ERROR_CODE_INVALID"}
        # Ten connections that each say a message of 64 MiB is coming, the most there is, and send a little of it.
        for _ in range(10):
            sock = stack.enter_context(dial(ports["data"]))
            sock.sendall(http2.GREETING + http2.call("/fastcheck.v1.PeerService/Replicate"))
            sock.sendall(http2.message(b"x" * 1000, announced=64 << 20))
        commit()
        assert not [m for m in replicas_on_disk(cluster, VICTIM) if m.parent.name == "giant"]


def test_what_is_planted_in_the_store_of_a_stopped_node_is_not_followed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The last one: it restarts a node. Links, half files, files of other kinds, flipped bytes."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"not the store's" * 1000)
    # Two ranks there: whichever nodes hold the copies, there are enough manifests to be damaged.
    planted = Job(cluster, ["node-0", VICTIM, VICTIM], name="planted", megabytes=0.5)
    beside = Job(cluster, ["node-0", "node-2"], name="beside-planting", megabytes=0.5)
    planted.commit(1)
    planted.commit(2)
    beside.commit(1)
    ram = Path(next(n["ram_dir"] for n in cluster.status()["nodes"] if n["node_id"] == VICTIM))
    cluster.kill(VICTIM)
    victims = [m for m in replicas_on_disk(cluster, VICTIM) if m.parent.name == "planted"]
    assert len(victims) >= 4
    flip, cut, link, pipe = victims[:4]
    flip.write_bytes(bytes([flip.read_bytes()[0] ^ 1]) + flip.read_bytes()[1:])
    cut.write_bytes(cut.read_bytes()[:-20])
    link.unlink()
    link.symlink_to(outside)
    pipe.unlink()
    os.mkfifo(pipe)
    segments = sorted(ram.glob("segments/*"), key=lambda path: path.stat().st_size)
    for segment in segments[-2:]:
        os.truncate(segment, 4096)
    (ram / "segments" / f"{'a' * 32}.seg").symlink_to(outside)
    (ram / "manifests" / "linked").symlink_to(tmp_path)
    (ram / "tmp" / "x").symlink_to(tmp_path)
    beside.commit(2)
    cluster.start(VICTIM)
    until(lambda: node_states(cluster, "node-0")[VICTIM] == "UP", "the node to come back")
    assert outside.read_bytes() == b"not the store's" * 1000
    assert not [path for path in ram.rglob("*") if path.is_symlink() or path.is_fifo()]
    found = counters(cluster, VICTIM)
    assert found["manifests_dropped"] >= 4
    log = cluster.log_file(VICTIM).read_text()
    assert "Traceback" not in log
    assert all(path.name in log for path in (flip, cut, link, pipe)), "what was dropped is told"
    beside.commit(3)
    # Trainers of the node that was killed come back as new processes.
    planted.start()
    assert planted.load() == 2, "from the other node, bit for bit"
    planted.commit(3)
    planted.stop()
    beside.stop()
