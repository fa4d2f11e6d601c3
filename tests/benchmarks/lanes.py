"""The bulk lane by itself: CPU per byte at both ends, its share of shaped links, and what training beside it loses.

CPU is that of the two data processes for copies without codec, digests included. Shaped links are veth pairs between
network namespaces (root only) with a real daemon in each. `--only lanes --rows allreduce` runs a part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from tests.netlab.lab import Lab
from tests.netlab.wires import ROOT, why_not

from fastcheck import Checkpointer
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

from .limits import FramedTcp
from .report import Figure

#: Gbit/s, and how long a put is to take at that rate, in seconds: long enough that its beginning does not count, and
#: little enough memory.
LINKS = {1.0: 4.0, 2.5: 2.0, 10.0: 1.0}
#: What is left of a link's rate for payload in packets of 1500 bytes.
PAYLOAD_CEILING = 0.956
#: Saves before the measured ones. Both ends take turns among their segments: so many until each was mapped and used.
WARM_UP = 5
LANE_STREAMS = 2
CPU_STATE_BYTES = 512 << 20
ALL_REDUCE_MBIT = 1000.0
#: A step of training: computing, where the link is idle, then 64 MiB of gradients, 0.56 s of the link.
COMPUTE_S = 0.8
GRADIENT_BYTES = 64 << 20
TRAINING_S = 20.0
#: What is copied beside it: 1.1 s of the link every 4 s, so that it hurts if it takes what it can get.
COPY_BYTES = 128 << 20
COPY_EVERY_S = 4.0

_SAVE = """
import json, sys, torch
from fastcheck import Checkpointer
count, saves = int(sys.argv[1]), int(sys.argv[2])
state = {"w": torch.zeros(count)}
with Checkpointer("lanes", rank=0, world_size=1) as ckpt:
    seconds = []
    for step in range(1, saves + 1):
        state["w"].uniform_()
        handle = ckpt.save(step, state)
        handle.result(timeout=300)
        seconds.append(handle.stats["replicate_s"])
print(json.dumps(seconds))
"""
#: Saves at fixed moments without end, as a trainer does every few steps. The first ones, at the same pace, touch memory
#: and tell the daemon the pace; it would take them for the pace if they came at once.
_KEEP_SAVING = """
import itertools, sys, time, torch
from fastcheck import Checkpointer
state = {"w": torch.rand(int(sys.argv[1]))}
with Checkpointer("lanes", rank=0, world_size=1) as ckpt:
    moment = time.monotonic()
    for step in itertools.count(1):
        ckpt.save(step, state).result(timeout=300)
        if step == 4:
            print("ready", flush=True)
        moment += float(sys.argv[2])
        time.sleep(max(0.0, moment - time.monotonic()))
"""
#: Prints how long each all-reduce took.
_TRAIN = """
import json, os, sys, time, torch
import torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
rank, where, seconds, count, compute_s = int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:])
dist.init_process_group("gloo", init_method=f"tcp://{where}:29400", rank=rank, world_size=2)
gradients, go_on, took = torch.ones(int(count)), torch.ones(1), []
dist.all_reduce(gradients)
started = time.monotonic()
while go_on.item() == 1:
    time.sleep(compute_s)
    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(gradients)
    took.append(time.monotonic() - began)
    go_on.fill_(1 if time.monotonic() - started < seconds else 0)
    dist.broadcast(go_on, 0)
if rank == 0:
    print(json.dumps(took))
dist.destroy_process_group()
"""


def lane_cpu(rounds: int) -> list[Figure]:
    """CPU seconds of both data processes per 10^9 bytes copied raw, hashed at both ends; in turns with the limit."""
    state = {"w": torch.zeros(CPU_STATE_BYTES // 4)}
    runs, limit_runs = [], []
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        LocalCluster(Path(folder)) as cluster,
        contextlib.closing(FramedTcp(CPU_STATE_BYTES, LANE_STREAMS, digests=True)) as limit,
    ):
        settings = {"codec": "never", "spread": 1, "lane_streams": LANE_STREAMS}
        cluster.up(2, tolerate=1, ram_budget="4GiB", settings=settings)
        data = [_data_process(cluster, node) for node in cluster.node_ids]
        with Checkpointer("lanes", rank=0, world_size=1, address=cluster.address("node-0")) as ckpt:
            for step in range(1, WARM_UP + rounds + 1):
                state["w"].uniform_()
                before = sum(map(_cpu_s, data))
                ckpt.save(step, state).result(timeout=300)
                used_s = sum(map(_cpu_s, data)) - before
                if step > WARM_UP:
                    runs.append(used_s / (CPU_STATE_BYTES / 1e9))
                    limit_runs.append(limit.cpu_s() / (CPU_STATE_BYTES / 1e9))
    name = "lane without codec, CPU of both ends, digests included"
    return [Figure(name, "s/GB", runs, limit_runs, "framed TCP with xxh3", "<= 0.35")]


def link_shares(rounds: int) -> list[Figure]:
    """State bytes per second of a put over a shaped link, as a share of what the link has for payload."""
    figures = []
    for rate, lasts_s in LINKS.items():
        size = int(rate * 1e9 / 8 * lasts_s) // 4 * 4
        lab = {
            "codec": "never",
            "spread": 1,
            "pacing": "off",
            "keep_steps": 1,
            "ram_budget_bytes": f"{5 * size >> 20}MiB",
        }
        with (
            tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
            Lab(Path(folder), 3, **lab) as cluster,
        ):
            cluster.network.shape("node-0", rate * 1000)
            seconds = json.loads(cluster.train("node-0", _SAVE, size // 4, WARM_UP + rounds))[WARM_UP:]
        ceiling = rate * 1e9 / 8 * PAYLOAD_CEILING
        figures.append(
            Figure(f"put over {rate:g} Gbit/s, share of the payload ceiling", "", [size / s / ceiling for s in seconds],
                   goal=">= 0.98")
        )  # fmt: skip
    return figures


def all_reduces(rounds: int) -> list[Figure]:
    """Seconds of an all-reduce of two ranks over a shaped link: alone, and while one of the nodes replicates.

    The link binds: nothing else slows the all-reduce, and copies leave by the same interface as its bytes.
    """
    runs: dict[str, list[float]] = {"off": [], "adaptive": []}
    alone: dict[str, list[float]] = {"off": [], "adaptive": []}
    how_much = [str(COPY_BYTES // 4), str(COPY_EVERY_S)]
    for _ in range(rounds):
        for pacing in ("off", "adaptive"):
            lab = {
                "codec": "never",
                "spread": 1,
                "pacing": pacing,
                "keep_steps": 1,
                "ram_budget_bytes": "1GiB",
            }
            with (
                tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
                Lab(Path(folder), 3, **lab) as cluster,
            ):
                for node in ("node-0", "node-1"):
                    cluster.network.shape(node, ALL_REDUCE_MBIT)
                alone[pacing].append(_all_reduce_s(cluster))
                saver = subprocess.Popen(
                    cluster.network.command("node-0", sys.executable, "-c", _KEEP_SAVING, *how_much),
                    env=os.environ | {"FASTCHECK_ADDRESS": cluster.address("node-0"), "PYTHONPATH": _path()},
                    stdout=subprocess.PIPE, text=True, cwd=ROOT,
                )  # fmt: skip
                try:
                    assert saver.stdout is not None and saver.stdout.readline() == "ready\n"
                    before, began = _bytes_sent(cluster), time.monotonic()
                    runs[pacing].append(_all_reduce_s(cluster))
                    sent, seconds = _bytes_sent(cluster) - before, time.monotonic() - began
                    if sent < 0.7 * COPY_BYTES * seconds / COPY_EVERY_S:
                        raise RuntimeError(
                            f"only {sent} bytes were copied in {seconds:.0f} s: too few to say"
                        )
                    print(f"pacing {pacing}: {runs[pacing][-1]:.3f} s, alone {alone[pacing][-1]:.3f} s, "
                          f"{sent / 1e6:.0f} MB copied in {seconds:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
                finally:
                    saver.kill()
                    saver.wait(10)
    link = f"{ALL_REDUCE_MBIT / 1000:g} Gbit/s"
    said = (
        f"all-reduce of {GRADIENT_BYTES >> 20} MiB every {COMPUTE_S:g} s over {link}, "
        f"{COPY_BYTES >> 20} MiB copied every {COPY_EVERY_S:g} s"
    )
    return [
        Figure(f"{said}, pacing: {pacing}", "s", runs[pacing], alone[pacing], "alone", goal)
        for pacing, goal in (("off", ""), ("adaptive", "ratio <= 1.05"))
    ]


def _all_reduce_s(cluster: Lab) -> float:
    """The mean over a while: whoever is slowed in one step is slowed in training."""
    said = [TRAINING_S, GRADIENT_BYTES // 4, COMPUTE_S]
    where = cluster.network.address("node-0")
    ranks = [
        subprocess.Popen(
            cluster.network.command(
                f"node-{rank}", sys.executable, "-c", _TRAIN, str(rank), where, *map(str, said)
            ),
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        out, _ = ranks[0].communicate(timeout=TRAINING_S + 90)
        return statistics.mean(json.loads(out))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


def _bytes_sent(cluster: Lab) -> int:
    with AdminClient(cluster.address("node-0"), timeout_s=10) as admin:
        node = next(n for n in admin.nodes()["nodes"] if n["node_id"] == "node-0")
    return int(node["counters"]["bytes_sent"])


def _path() -> str:
    return os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)


def _data_process(cluster: LocalCluster, node: str) -> psutil.Process:
    found = [psutil.Process(pid) for pid in cluster.pids(node)]
    return next(p for p in found if p.name() == "fcheck-data")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


ROWS: dict[str, Callable[[int], list[Figure]]] = {
    "cpu": lane_cpu,
    "shares": link_shares,
    "allreduce": all_reduces,
}
NEED_NAMESPACES = ("shares", "allreduce")


def measure(rounds: int, say: Callable[[str], None], rows: Sequence[str] | None = None) -> list[Figure]:
    """All figures that can be had here, or some; `say` is told what is left out."""
    figures = []
    for name in rows or ROWS:
        if name in NEED_NAMESPACES and (reason := why_not()):
            say(f"lanes over shaped links are left out: {reason}")
            continue
        say(f"lanes: {name}")
        figures += ROWS[name](rounds)
    return figures
