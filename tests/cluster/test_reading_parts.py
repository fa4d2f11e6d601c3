"""Parts of a step read by a node that holds nothing of it, while holders are well, wrong and gone (docs/reading.md).

One cluster for all of them: a job of four ranks on four nodes, read on the fifth. What hurts holders comes last.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cluster.harness import (
    Job,
    chunks_on_disk,
    counters,
    flip_byte,
    make_state,
    node_states,
    paused,
    process_of,
    replicas_on_disk,
    until,
)

from fastcheck import Checkpointer, InvalidArgumentError, OutOfMemoryError, StepNotFoundError
from fastcheck.admin import AdminClient
from fastcheck.connection import Connection, parse_address
from fastcheck.daemon import Daemon
from fastcheck.local import LocalCluster
from fastcheck.step_reader import BoxInto, StepReader
from fastcheck_proto.v1 import state_pb2

RANKS = ["node-0", "node-1", "node-2", "node-3"]
READER = "node-4"
MEGABYTES = 16
ELEMENTS = MEGABYTES * 262144 // 4
CHUNK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.up(5, tolerate=1, ram_budget="160MiB", settings={"keep_steps": 2})
        cluster.kill(READER, wipe=True)
        until(lambda: node_states(cluster, RANKS[0])[READER] == "DOWN", "the reader's node to be called DOWN")
        made = Job(cluster, RANKS, megabytes=MEGABYTES)
        made.commit(1)
        cluster.start(READER)
        yield made
        made.stop()


@contextlib.contextmanager
def reader_of(job: Job, name: str = "", address: str = "", **options: Any) -> Iterator[StepReader]:
    daemon = Daemon(Connection(parse_address(address or job.cluster.address(READER))))
    try:
        with StepReader(daemon, name or job.name, timeout_s=120, **options) as reader:
            yield reader
    finally:
        daemon.close()


def record_of(reader: StepReader, rank: int, end_of_name: str) -> state_pb2.TensorRecord:
    return next(r for r in reader.ranks[rank].header.tensors if r.name.endswith(end_of_name))


def read_all(reader: StepReader) -> dict[int, bytes]:
    wants = {rank: [(0, each.state_bytes)] for rank, each in reader.ranks.items()}
    with reader.read(wants) as states:
        return {rank: bytes(state.numpy()) for rank, state in states.items()}


def layer(reader: StepReader, rank: int, name: str, low: int, count: int) -> torch.Tensor:
    target = torch.empty(count)
    reader.fill([BoxInto(rank, record_of(reader, rank, name), (low,), (count,), target)])
    return target


def used_bytes(job: Job) -> int:
    """What is in use on the reader's node."""
    with AdminClient(job.cluster.address(READER), timeout_s=5) as admin:
        nodes = admin.nodes()["nodes"]
    return next(int(node["ram_used_bytes"]) for node in nodes if node["node_id"] == READER)


def test_only_the_touched_chunks_come_and_only_while_they_are_read(job):
    before = counters(job.cluster, READER)
    with reader_of(job) as reader:
        assert (reader.step, reader.world_size, sorted(reader.ranks)) == (1, 4, [0, 1, 2, 3])
        headers = reader.stats["fetched_bytes"]
        assert 0 < headers <= 4 * CHUNK_BYTES
        boxes = [
            BoxInto(rank, record_of(reader, rank, "layer2"), (100,), (1000,), torch.empty(1000))
            for rank in range(4)
        ]
        reader.fill(boxes)
        for box in boxes:
            wanted = job.state(1, box.rank)["model"]["layer2"][100:1100]
            assert torch.equal(box.target.view(torch.int32), wanted.view(torch.int32))
        # One chunk of each rank, and nothing of it was here.
        assert 0 < reader.stats["fetched_bytes"] - headers <= 4 * CHUNK_BYTES
        assert reader.stats["local_bytes"] == 0
        with reader.read({2: [(0, 10), (5, 10)]}) as states:
            assert 0 < used_bytes(job) <= CHUNK_BYTES
            assert states[2].numel() == reader.ranks[2].state_bytes
        until(lambda: used_bytes(job) == 0, "the memory to be given back")
        stats = reader.stats
    after = counters(job.cluster, READER)
    assert after["reads"] - before["reads"] == stats["reads"] == 3
    assert after["read_bytes"] - before["read_bytes"] == stats["fetched_bytes"]


def test_a_read_fences_nobody(job):
    with reader_of(job) as reader:
        layer(reader, 0, "layer0", 0, 10)
        job.commit(2)  # by the same trainers
        assert layer(reader, 0, "layer0", 0, 10).tolist() == job.state(1, 0)["model"]["layer0"][:10].tolist()
    with reader_of(job) as reader:
        assert reader.step == 2


def test_where_the_ranks_own_bytes_lie_they_are_had_from_there(job):
    with reader_of(job, address=job.cluster.address(RANKS[1])) as reader:
        before = reader.stats["fetched_bytes"]
        assert torch.equal(layer(reader, 1, "layer3", 7, 99), job.state(2, 1)["model"]["layer3"][7:106])
        assert reader.stats["fetched_bytes"] == before


def test_a_trainer_without_a_daemon_reads_by_a_stream(job):
    with AdminClient(job.cluster.address(READER), timeout_s=5) as admin:
        address = next(n["address"] for n in admin.nodes()["nodes"] if n["node_id"] == READER)
    with reader_of(job, address=address) as far, reader_of(job) as near:
        assert torch.equal(layer(far, 3, "layer1", 5, 3000), job.state(2, 3)["model"]["layer1"][5:3005])
        wants = {0: [(0, 3), (100, 700_000), (3, 1)], 3: [(5_000_000, 10)]}
        with far.read(wants) as one, near.read(wants) as other:
            for rank, ranges in wants.items():
                for low, size in ranges:
                    assert torch.equal(one[rank][low : low + size], other[rank][low : low + size])


def test_what_is_not_there_and_what_makes_no_sense_is_said(job):
    with pytest.raises(StepNotFoundError, match="no committed step yet"), reader_of(job, name="nobody"):
        pass
    with pytest.raises(StepNotFoundError, match="no committed step 77"), reader_of(job, step=77):
        pass
    with reader_of(job) as reader:
        size = reader.ranks[0].state_bytes
        for wants in ({9: [(0, 1)]}, {0: [(size - 1, 2)]}):
            with pytest.raises(InvalidArgumentError), reader.read(wants):
                pass


def test_what_does_not_fit_the_budget_is_refused_before_anything_is_fetched(job):
    with reader_of(job) as reader, contextlib.ExitStack() as held:
        wants = {rank: [(0, each.state_bytes)] for rank, each in reader.ranks.items()}
        for _ in range(2):  # several readers at once, each with memory of its own
            held.enter_context(reader.read(wants))
        before = counters(job.cluster, READER)["bytes_received"]
        with pytest.raises(OutOfMemoryError, match="read less at a time"), reader.read(wants):
            pass
        assert counters(job.cluster, READER)["bytes_received"] == before
        assert torch.equal(layer(reader, 0, "layer0", 0, 9), job.state(2, 0)["model"]["layer0"][:9])


SLEEPER = """
import sys
from fastcheck.connection import Connection, parse_address
from fastcheck.daemon import Daemon
from fastcheck.step_reader import StepReader
with StepReader(Daemon(Connection(parse_address(sys.argv[1]))), "gpt") as reader:
    with reader.read({0: [(0, 1)]}):
        print("reading", flush=True)
        sys.stdin.read()
"""


def test_a_reader_that_dies_frees_the_memory(job):
    command = [sys.executable, "-c", SLEEPER, job.cluster.address(READER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            assert used_bytes(job) > 0
        finally:
            process.kill()
    until(lambda: used_bytes(job) == 0, "the memory of the dead reader")
    ram_dir = next(n["ram_dir"] for n in job.cluster.status()["nodes"] if n["node_id"] == READER)
    assert not list(Path(ram_dir).glob("segments/*.seg"))


def test_a_state_that_all_ranks_hold_alike_is_read_from_its_parts(job):
    whole = {"model": make_state(3, 1, 0, 8)["model"], "rng": None}
    ranks = [
        Checkpointer(
            "ddp",
            rank=rank,
            world_size=2,
            address=job.cluster.address(RANKS[rank]),
            replicated=True,
            per_rank=("rng",),
        )
        for rank in range(2)
    ]
    with contextlib.ExitStack() as stack:
        for each in ranks:
            stack.enter_context(each)
        saves = [each.save(1, whole | {"rng": torch.full((3,), each.rank)}) for each in ranks]
        for save in saves:
            save.result(timeout=60)
    with reader_of(job, name="ddp") as reader:
        targets = {name: torch.empty_like(tensor) for name, tensor in whole["model"].items()}
        own = torch.empty(3, dtype=torch.int64)
        boxes = [
            BoxInto(1, record_of(reader, 1, name), (0,), tuple(target.shape), target)
            for name, target in targets.items()
        ]
        reader.fill([*boxes, BoxInto(1, record_of(reader, 1, "rng"), (0,), (3,), own)])
        assert own.tolist() == [1, 1, 1]
        for name, target in targets.items():
            assert torch.equal(target.view(torch.int32), whole["model"][name].view(torch.int32)), name


def test_others_take_over_from_a_holder_that_dies_during_a_read(job):
    victim = RANKS[2]
    found: list[dict[int, bytes]] = []
    with reader_of(job) as reader:
        good = read_all(reader)
        with paused(process_of(job.cluster, victim, "data")):
            reading = threading.Thread(target=lambda: found.append(read_all(reader)))
            asked = counters(job.cluster, READER)["bytes_received"]
            reading.start()
            until(lambda: counters(job.cluster, READER)["bytes_received"] > asked, "the read to be under way")
            job.cluster.kill(victim)
        reading.join(60)
        assert found == [good]
    job.cluster.start(victim)


def test_chunks_that_are_bad_at_a_holder_come_from_another(job):
    with reader_of(job) as reader:
        good = read_all(reader)
        for manifest in replicas_on_disk(job.cluster, RANKS[0]):
            for path, offset, _ in chunks_on_disk(manifest):
                flip_byte(path, offset)

        def met():  # each chunk is asked of one of its holders, and the bad one may just not have its turn
            assert read_all(reader) == good
            return reader.stats["bad_copies"]

        until(met, "a read that meets the bad copies")
