"""`make bench`: idling, importing, finding the dead, saving and restoring 1.5 GB, shaped links, the codec.

Needs 16 GB of memory; run it alone.

The codec's part, and `--only lossy`, train small models in this process and need no cluster. Nor do those about
placement and importing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from fastcheck import Checkpointer
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

from . import codec, lanes, lossy_resume, paper_report, placement, staging
from .codec_rows import print_rows
from .detection import detection, soak
from .entry import end_in_order_when_told, write_results
from .growth import growth
from .importing import importing
from .limits import FramedTcp, Memcpy
from .links import links
from .replicated import replicated
from .report import Figure, print_table
from .restoring import restoring
from .save_loop import save_loop
from .scale import scale
from .seed_noise import print_experiment
from .workload import change, gpt2_state, state_bytes

#: Saves before the measured ones: the first ones touch fresh memory.
WARM_UP = 2
STREAMS = 2


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def saving(cluster: LocalCluster, rounds: int) -> list[Figure]:
    """`save` against memcpy, replication to one peer against framed TCP, commit."""
    state = gpt2_state()
    size = state_bytes(state)
    memcpy, tcp = Memcpy(size), FramedTcp(size, STREAMS)
    runs: dict[str, list[float]] = {k: [] for k in ("save", "copy", "replicate", "tcp", "commit", "first")}
    with Checkpointer("bench", rank=0, world_size=1, address=cluster.address("node-0")) as ckpt:
        for step in range(1, WARM_UP + rounds + 1):
            change(state)
            copy_s = memcpy.run()
            started = time.perf_counter()
            handle = ckpt.save(step, state)
            blocked_s = time.perf_counter() - started
            handle.result(timeout=300)
            tcp_s = tcp.run()
            say(
                f"step {step}: save blocked {blocked_s * 1e3:.0f} ms, memcpy {copy_s * 1e3:.0f} ms, "
                f"replicated in {handle.stats['replicate_s']:.3f} s, framed TCP {tcp_s:.3f} s"
            )
            if step <= WARM_UP:
                runs["first"].append(blocked_s * 1e3)
                continue
            runs["save"].append(blocked_s * 1e3)
            runs["copy"].append(copy_s * 1e3)
            runs["replicate"].append(size / handle.stats["replicate_s"] / 1e9)
            runs["tcp"].append(size / tcp_s / 1e9)
            runs["commit"].append(handle.stats["commit_s"] * 1e3)
    tcp.close()
    return [
        Figure("save blocks", "ms", runs["save"], runs["copy"], "memcpy, 1 thread", "ratio <= 1.3"),
        Figure("save blocks, first two (cold memory)", "ms", runs["first"]),
        Figure(
            "replicated to one peer, digests at both ends",
            "GB/s",
            runs["replicate"],
            runs["tcp"],
            f"framed TCP, {STREAMS} streams",
            "ratio >= 0.5",
        ),
        Figure("commit after the last acknowledgement", "ms", runs["commit"]),
    ]


def idling(cluster: LocalCluster, seconds: float) -> list[Figure]:
    """CPU and memory of each kind of process of an idle cluster."""
    processes: dict[str, list[psutil.Process]] = {}
    for node in cluster.node_ids:
        for pid in cluster.pids(node):
            process = psutil.Process(pid)
            name = process.name()
            kind = name.removeprefix("fcheck-") if name.startswith("fcheck-") else "parent"
            processes.setdefault(kind, []).append(process)
    with AdminClient(cluster.address("node-0")) as admin:
        admin.nodes()
    time.sleep(5)  # let the start-up settle

    def cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = {p.pid: cpu_s(p) for group in processes.values() for p in group}
    time.sleep(seconds)
    figures = []
    for kind, group in processes.items():
        used = [(cpu_s(p) - before[p.pid]) / seconds * 100 for p in group]
        goal = "agent and registry together < 3 %" if kind != "data" else ""
        figures.append(Figure(f"{kind}, idle", "% of a core", used, goal=goal))
        figures.append(Figure(f"{kind}, resident", "MB", [p.memory_info().rss / 1e6 for p in group]))
    return figures


@contextlib.contextmanager
def local_cluster(nodes: int, ram_budget: str, **settings: Any) -> Any:
    """A cluster in a folder of its own; `settings` are the daemon's config keys."""
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-bench-") as folder,
        LocalCluster(Path(folder)) as cluster,
    ):
        cluster.up(nodes, tolerate=1, ram_budget=ram_budget, settings=settings)
        yield cluster


def transfers(rounds: int) -> list[Figure]:
    """Saving and replicating on three voters, as in earnest; spread 1, so that all goes to one peer."""
    with local_cluster(3, "7GiB", spread=1) as cluster:
        return saving(cluster, rounds)


def restores(rounds: int, quick: bool) -> list[Figure]:
    """Restoring on three voters and as many more nodes as holders need."""
    return restoring(
        lambda holders: local_cluster(max(3, holders + 1), "7GiB", spread=holders), rounds, quick, say
    )


def idle(seconds: float) -> list[Figure]:
    """A cluster of four nodes that does nothing."""
    with local_cluster(4, "256MiB") as cluster:
        return idling(cluster, seconds)


def shaped_links(rounds: int) -> list[Figure]:
    """The codec over links of several rates, where they can be made."""
    if os.geteuid() == 0:
        return links(rounds)
    say("links are left out: shaping them takes root, for network namespaces")
    return []


#: What can be asked for alone, in the order in which it runs: idling first, since after gigabytes of transfers the
#: machine itself is busy for a while. Some run only when asked for: simulated nodes take the cores that a leader is
#: measured on, growth needs 24 GB of memory, replicated 60 (four ranks that save a whole state each), and the last
#: three take long.
PARTS = (
    "idle",
    "import",
    "detection",
    "loop",
    "transfer",
    "staging",
    "restore",
    "lanes",
    "links",
    "placement",
    "codec",
    "replicated",
    "scale",
    "growth",
    "lossy",
    "soak",
    "paper",
)
#: Parts whose rows can be asked for alone.
ROWS: dict[str, Sequence[str]] = {"lanes": tuple(lanes.ROWS), "staging": tuple(staging.ROWS)}
ASKED_FOR = ("replicated", "scale", "growth", "lossy", "soak", "paper")


def measure(arguments: argparse.Namespace, parts: Sequence[str]) -> dict[str, Any]:
    """Run the parts and print their tables; everything measured, as JSON."""
    results: dict[str, Any] = {}
    quick = arguments.quick
    rounds = 1 if quick else arguments.rounds

    def scaled() -> list[Figure]:
        found, results["scale"] = scale(arguments.nodes, 3.0 if quick else arguments.idle_seconds, say)
        return found

    def grown() -> list[Figure]:
        found, results["not_run"] = growth(2 if quick else rounds, say, quick=quick)
        return found

    def shared() -> list[Figure]:
        with local_cluster(4, "24GiB") as cluster:
            return replicated(cluster, arguments.rounds, say)

    makes_figures: dict[str, Callable[[], list[Figure]]] = {
        "idle": lambda: idle(arguments.idle_seconds),
        "import": lambda: importing(arguments.rounds, say, quick=quick),
        "detection": lambda: detection(arguments.trials, say),
        "soak": lambda: soak(arguments.minutes, say, arguments.burners),
        "loop": lambda: save_loop(3, width=64) if quick else save_loop(),
        "transfer": lambda: transfers(arguments.rounds),
        "restore": lambda: restores(rounds, quick),
        "lanes": lambda: lanes.measure(arguments.rounds, say, arguments.rows),
        "replicated": shared,
        "staging": lambda: staging.measure(arguments.rounds, quick, say, arguments.rows),
        "links": lambda: shaped_links(arguments.rounds),
        "scale": scaled,
        "growth": grown,
        "placement": lambda: placement.measure(rounds, say),
    }
    figures = [figure for part, make in makes_figures.items() if part in parts for figure in make()]
    if figures:
        print_table(figures)
        results["figures"] = [f.to_json() for f in figures]
    if "codec" in parts:
        rows = list(codec.measure(rounds, quick, say))
        print_rows(rows)
        results["codec"] = [row.to_json() for row in rows]
    if "lossy" in parts:
        experiment = lossy_resume.run(2 if quick else arguments.seeds, quick, say)
        print_experiment(experiment)
        results["lossy"] = experiment.to_json()
    if "paper" in parts:
        results["paper"] = paper_report.run(arguments, say)
    return results


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--only", choices=PARTS, help=f"one part; without it, all but {', '.join(ASKED_FOR)}")
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="of the one part, only these: "
        + "; ".join(f"{part}: {', '.join(rows)}" for part, rows in ROWS.items()),
    )
    parser.add_argument("--nodes", type=int, default=100, help="simulated ones, of the scale part")
    parser.add_argument("--trials", type=int, default=50, help="detection: kills of each kind")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak")
    parser.add_argument(
        "--burners",
        type=int,
        help="of the soak: busy processes beside it; 0 if something else keeps all cores busy",
    )
    parser.add_argument("--seeds", type=int, default=8, help="of the lossy experiment")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="little of everything, to see that it runs; not of every part",
    )
    paper_report.add_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    known = ROWS.get(arguments.only, ())
    if unknown := set(arguments.rows or ()) - set(known):
        parser.error(
            f"--rows {' '.join(unknown)}: {arguments.only or 'all parts together'} has "
            f"{', '.join(known) if known else 'none to choose from'}"
        )
    end_in_order_when_told()
    results = measure(
        arguments, [arguments.only] if arguments.only else [part for part in PARTS if part not in ASKED_FOR]
    )
    path = write_results(arguments.out, results)
    print(f"every run: {path}")


if __name__ == "__main__":
    main()
