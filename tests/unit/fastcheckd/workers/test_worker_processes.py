"""Real worker processes: the same bytes as threads make, whatever happens to the workers."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.chunk_plan import ChunkPlan, Run, Unit, opaque
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.encoder import encode
from fastcheckd.codec.fitting import Fits
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import CodecError, MispredictedError
from fastcheckd.store.copying import copy_bytes
from fastcheckd.store.segments import Segment, place_of
from fastcheckd.transfer.codec_pool import CodecPool, call_off
from fastcheckd.workers.crew import Workers
from fastcheckd.workers.work import HERE, WorkInWorkers

WAIT_S = 30.0
N = 20_000
#: Chunks lie where no page begins.
ODD = 4096 + 64


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p))


class Stand:
    """Workers, and two steps of a chunk in segments, with room for what is decoded."""

    def __init__(self, folder: Path, timeout_s: float = WAIT_S, processes: int = 1) -> None:
        self.folder = folder
        self.counters = Counters()
        self.workers = Workers(
            folder, processes=processes, threads=2, nice=3, timeout_s=timeout_s, counters=self.counters
        )
        self.work = WorkInWorkers(self.workers, self.counters)
        assert self.workers.wait_ready(processes, WAIT_S)
        random = np.random.default_rng(5)
        m0 = random.standard_normal(N).astype(np.float32)
        v0 = np.square(random.standard_normal(N)).astype(np.float32)
        w0 = random.standard_normal(N).astype(np.float32)
        g, f = (random.standard_normal(N) * 0.1).astype(np.float32), np.float32
        m1, v1 = f(0.9) * m0 + f(0.1) * g, f(0.999) * v0 + f(0.001) * g * g
        step = pb.OptimizerStep(
            kind=pb.OPTIMIZER_KIND_ADAMW, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=4
        )
        # The rate is not the one that the trainer names: it has to be found.
        denominator = np.sqrt(v1) / f((1 - 0.999**4) ** 0.5) + f(1e-8)
        w1 = w0 * f(1 - 2e-3 * 0.01) - f(2e-3 / (1 - 0.9**4)) * (m1 / denominator)
        self.step = step
        roles = (pb.ROLE_PARAM, pb.ROLE_EXP_AVG, pb.ROLE_EXP_AVG_SQ)
        runs = tuple(Run(4 * N * i, N, DType.FLOAT32, role) for i, role in enumerate(roles))
        self.plan = ChunkPlan(12 * N + 100, (Unit(runs, step),))
        tail = random.bytes(100)
        self.new = self.place(b"".join(a.tobytes() for a in (w1, m1, v1)) + tail)
        self.base = self.place(b"".join(a.tobytes() for a in (w0, m0, v0)) + tail)
        self.out = self.place(bytes(self.plan.bytes))
        self.digest, self.base_digest = chunk_digest(self.new), chunk_digest(self.base)

    def place(self, data: bytes) -> memoryview:
        segment = Segment.create(self.folder, -(-(ODD + len(data)) // 4096) * 4096, "copy")
        view = segment.view[ODD : ODD + len(data)]
        copy_bytes(view, data)
        return view

    def encode(self, work, plan=None, *, base=True, fits=None):
        return work.encode(
            self.new, self.base if base else None, plan or self.plan, step=4, base_step=3 * base,
            digest=self.digest, base_digest=self.base_digest if base else bytes(16), fits=fits or Fits(),
        )  # fmt: skip

    def payload(self) -> memoryview:
        encoded, _ = self.encode(HERE)
        assert encoded is not None
        return memoryview(encoded.payload)

    def counted(self) -> tuple[int, int, int]:
        """By workers, not by workers, lost."""
        names = ("chunks_by_workers", "chunks_not_by_workers", "workers_lost")
        return tuple(self.counters.get(name) for name in names)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path)
    yield stand
    stand.workers.close()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Stand]:
    """Takes a worker that is silent for 0.3 s for hung."""
    stand = Stand(tmp_path, timeout_s=0.3)
    yield stand
    stand.workers.close()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.005)


def stop(pid: int) -> None:
    """SIGSTOP; when this returns it stands still."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def was_given_a_job(stand: Stand) -> bool:
    """Whether a job lies in a socket of a worker, which has not read it."""

    def unread_bytes(line) -> int:
        return int.from_bytes(fcntl.ioctl(line._ours, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    return any(unread_bytes(line) for worker in list(stand.workers._living) for line in worker.lines)


def test_what_workers_encode_is_what_threads_encode(stand: Stand) -> None:
    fits_there, fits_here = Fits(), Fits()
    for base in (True, False):
        there, seconds = stand.encode(stand.work, base=base, fits=fits_there)
        here, _ = stand.encode(HERE, base=base, fits=fits_here)
        assert there is not None and here is not None
        assert bytes(there.payload) == bytes(here.payload) and there.uses == here.uses
        assert 0 < seconds < WAIT_S
    assert {use.codec for use in stand.encode(stand.work)[0].uses} >= {"adam"}
    assert fits_there.told(stand.step) == fits_here.told(stand.step)
    assert fits_there.told(stand.step)[0] == pytest.approx(2e-3, rel=1e-4)
    alone = stand.work.encode_alone(stand.new, step=4, digest=stand.digest)
    assert alone == HERE.encode_alone(stand.new, step=4, digest=stand.digest)
    assert stand.counted() == (4, 0, 0)


def test_what_was_learnt_before_goes_to_the_worker(stand: Stand) -> None:
    hopeless = Fits()
    for _ in range(3):
        hopeless.failed(stand.step)  # so nobody looks for a rate any more
    there, _ = stand.encode(stand.work, fits=hopeless)
    assert "adam" not in {use.codec for use in there.uses}
    assert stand.counted()[:2] == (1, 0)


def test_what_does_not_shrink_stays_as_it_is(stand: Stand) -> None:
    noise = stand.place(np.random.default_rng(1).bytes(stand.plan.bytes))
    made, _ = stand.work.encode(
        noise, None, opaque(len(noise)), step=4, base_step=0, digest=chunk_digest(noise), base_digest=bytes(16),
        fits=Fits(),
    )  # fmt: skip
    assert made is None
    assert stand.work.encode_alone(noise, step=4, digest=chunk_digest(noise)) is None
    assert stand.counted() == (2, 0, 0)


def test_chunks_are_decoded_into_their_place_and_the_way_back_is_made(stand: Stand) -> None:
    payload = stand.payload()
    uses, back = stand.work.apply(payload, stand.base, stand.out, old_digest=stand.base_digest)
    assert stand.out == stand.new
    copy_bytes(stand.out, bytes(len(stand.out)))
    here = HERE.apply(payload, stand.base, stand.out, old_digest=stand.base_digest)
    assert (uses, bytes(back)) == (here[0], bytes(here[1]))
    copy_bytes(stand.out, bytes(len(stand.out)))
    alone = encode(stand.new, None, stand.plan, step=4, base_step=0, digest=stand.digest)
    assert stand.work.decode(alone.payload, stand.out) == alone.uses
    assert stand.out == stand.new
    assert stand.counted() == (2, 0, 0)


def test_what_is_wrong_with_a_payload_is_told_by_the_worker_which_lives_on(stand: Stand) -> None:
    payload = bytearray(stand.payload())
    (pid,) = stand.workers.pids
    with pytest.raises(CodecError, match="other bytes"):
        stand.work.apply(payload, stand.base, stand.out, old_digest=bytes([1] * 16))
    stand.base[0] ^= 1
    with pytest.raises(MispredictedError):
        stand.work.apply(payload, stand.base, stand.out, old_digest=stand.base_digest)
    payload[len(payload) // 2] ^= 1
    with pytest.raises(CodecError, match="checksum"):
        stand.work.apply(payload, stand.base, stand.out, old_digest=stand.base_digest)
    assert stand.workers.pids == [pid]
    assert stand.counted()[1:] == (0, 0)


def test_a_worker_maps_a_segment_for_one_job_only(stand: Stand) -> None:
    stand.encode(stand.work)
    stand.work.apply(stand.payload(), stand.base, stand.out, old_digest=stand.base_digest)
    assert stand.counted()[0] == 2
    (pid,) = stand.workers.pids
    assert ".seg" not in Path(f"/proc/{pid}/maps").read_text()
    assert ".seg" not in " ".join(str(p.readlink()) for p in Path(f"/proc/{pid}/fd").iterdir())


def test_workers_step_back_as_the_codecs_threads_do(stand: Stand) -> None:
    (pid,) = stand.workers.pids
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, t.id) for t in psutil.Process(pid).threads()} == {max(3, mine)}


def test_memory_that_is_no_segment_is_worked_on_here(stand: Stand) -> None:
    elsewhere = memoryview(bytearray(stand.new))
    assert place_of(elsewhere) is None
    assert stand.work.encode_alone(elsewhere, step=4, digest=stand.digest) is not None
    assert stand.work.decode(
        encode(stand.new, None, stand.plan, step=4, base_step=0, digest=stand.digest).payload, elsewhere
    )
    assert elsewhere == stand.new
    assert stand.counted()[0] == 0


def test_what_a_worker_refuses_is_done_here(stand: Stand) -> None:
    (stand.folder / place_of(stand.base).segment).unlink()
    (pid,) = stand.workers.pids
    made, _ = stand.encode(stand.work)
    assert bytes(made.payload) == bytes(stand.payload())
    assert stand.counted() == (0, 1, 0) and stand.workers.pids == [pid]


def test_a_job_of_a_killed_worker_is_done_again_and_another_worker_comes(stand: Stand) -> None:
    (pid,) = stand.workers.pids
    stop(pid)  # so that it has the job when it is killed
    with ThreadPoolExecutor(1) as threads:
        applying = threads.submit(
            stand.work.apply, stand.payload(), stand.base, stand.out, old_digest=stand.base_digest
        )
        until(lambda: was_given_a_job(stand))
        assert not applying.done()
        os.kill(pid, signal.SIGKILL)
        uses, back = applying.result(WAIT_S)
    assert stand.out == stand.new
    assert gone(pid)
    copy_bytes(stand.out, bytes(len(stand.out)))
    assert (uses, bytes(back)) == HERE.apply(
        stand.payload(), stand.base, stand.out, old_digest=stand.base_digest
    )
    assert stand.counted()[:2] == (0, 1)
    assert stand.workers.wait_ready(1, WAIT_S)
    assert stand.counters.get("workers_lost") == 1
    assert stand.workers.pids != [pid]
    stand.encode(stand.work)
    assert stand.counted() == (1, 1, 1)


def test_a_hung_worker_is_killed_and_its_job_done_again(hasty: Stand) -> None:
    (pid,) = hasty.workers.pids
    stop(pid)
    made, _ = hasty.encode(hasty.work)
    assert gone(pid)
    assert bytes(made.payload) == bytes(hasty.payload())
    assert hasty.workers.wait_ready(1, WAIT_S)
    assert hasty.counted() == (0, 1, 1)


def test_a_job_that_is_called_off_ends_only_with_its_worker(hasty: Stand) -> None:
    (pid,) = hasty.workers.pids
    pool = CodecPool(1, 1, hasty.work)
    stop(pid)
    job = pool.submit(pool.work.apply, hasty.payload(), hasty.base, hasty.out, old_digest=hasty.base_digest)
    until(lambda: job.running() or job.done())
    call_off(job)
    assert gone(pid), "a worker may still write"
    pool.close()


def test_another_worker_takes_what_is_left(tmp_path: Path) -> None:
    stand = Stand(tmp_path, processes=2)
    try:
        first, second = stand.workers.pids
        os.kill(first, signal.SIGKILL)
        for _ in range(6):  # whether or not its loss was noticed yet
            stand.encode(stand.work)
        by_workers, not_by_workers, _ = stand.counted()
        assert by_workers >= 4 and by_workers + not_by_workers == 6
        assert second in stand.workers.pids
    finally:
        stand.workers.close()


def test_many_threads_use_all_workers(tmp_path: Path) -> None:
    stand = Stand(tmp_path, processes=2)
    try:
        wanted = bytes(stand.payload())
        outs = [stand.place(bytes(stand.plan.bytes)) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            for _ in range(5):
                jobs = [
                    threads.submit(stand.work.apply, wanted, stand.base, out, old_digest=stand.base_digest)
                    for out in outs
                ]
                assert len({bytes(job.result(WAIT_S)[1]) for job in jobs}) == 1
                assert all(out == stand.new for out in outs)
                for out in outs:
                    copy_bytes(out, bytes(len(out)))
        assert stand.counted() == (20, 0, 0)
    finally:
        stand.workers.close()


def test_a_worker_that_cannot_start_is_tried_again_and_missed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        counters = Counters()
        workers = Workers(tmp_path, processes=1, threads=1, nice=0, timeout_s=1, counters=counters)
        until(lambda: counters.get("workers_lost") >= 2)
    assert workers.wait_ready(1, WAIT_S)
    workers.close()


def test_closing_ends_them_and_their_keepers(tmp_path: Path) -> None:
    stand = Stand(tmp_path, processes=2)
    pids = stand.workers.pids
    stand.workers.close()
    assert all(gone(pid) for pid in pids)
    assert not [t for t in threading.enumerate() if t.name.startswith("worker-")]
    assert stand.encode(stand.work)[0] is not None  # here
    assert stand.counted() == (0, 1, 0)


_PARENT = """
import sys, time
from pathlib import Path
from fastcheckd.counters import Counters
from fastcheckd.workers.crew import Workers
workers = Workers(Path(sys.argv[1]), processes=2, threads=1, nice=0, timeout_s=5, counters=Counters())
assert workers.wait_ready(2, 60)
print(*workers.pids, flush=True)
time.sleep(600)
"""


def test_they_die_with_their_parent_even_when_stopped(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        processes = [psutil.Process(pid) for pid in pids]
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_chunk_tables_of_a_shard_name_places_in_its_segment(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path, 3 * 4096, "copy")
    table = ChunkTable([100, 5000])
    shard = segment.view[64 : 64 + table.shard_bytes]
    start, stop = table.range(1)
    place = place_of(shard[start:stop].toreadonly())
    assert (place.segment, place.offset, place.size) == (segment.name, 164, 5000)
