"""`make bench-peers`: the same state, saved to memory and restored, by FastCheck and by others, taking turns.

Needs 24 GB of memory; run it alone. `python -m tests.benchmarks.peers --only fastcheck,torch-save` for some of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..entry import end_in_order_when_told, write_results
from ..workload import WIDTH, width_of
from .catalogue import BY_KEY, CATALOGUE, OURS, PEERS, TORCHSTORE, Entry
from .rows import markdown, print_sides, side_of
from .runner import ROOT, Bounds, run

QUICK_BYTES = 64e6


def compare(
    entries: Sequence[Entry], pythons: dict[str, Path], width: int, starts: int, rounds: int, bounds: Bounds
) -> list[dict[str, Any]]:
    """Every candidate so many times in a fresh process, in turns, so that all see the same weather."""
    found: dict[str, dict[str, Any]] = {
        entry.key: {
            "key": entry.key,
            "title": entry.title,
            "safe": entry.safe,
            "versions": {},
            "starts": [],
            "reason": "",
        }
        for entry in entries
    }
    for start in range(1, starts + 1):
        for entry in entries:
            row = found[entry.key]
            if row["reason"]:
                continue
            print(f"{entry.title}, start {start} of {starts}", file=sys.stderr, flush=True)
            result = run(entry, pythons, width, rounds, bounds)
            row["versions"] = result.get("versions", row["versions"])
            if "rounds" in result:
                row["starts"].append(result["rounds"])
            else:
                row["reason"] = result["reason"]
                print(f"  not run: {result['reason']}", file=sys.stderr, flush=True)
    return list(found.values())


def main() -> None:
    """Run what was asked for; print the table, write every round."""
    parser = argparse.ArgumentParser(prog="make bench-peers", description=__doc__)
    parser.add_argument("--only", help=f"keys, with commas between them: {', '.join(BY_KEY)}")
    parser.add_argument(
        "--starts", type=int, default=3, help="fresh processes of each; one first save in each"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each process, after those that warm up")
    parser.add_argument(
        "--size", type=float, help="bytes of the state; default: as GPT-2 124M has it, 1.49 GB"
    )
    parser.add_argument("--quick", action="store_true", help="64 MB, 1 start, 2 rounds, to see that it runs")
    parser.add_argument("--seconds", type=float, default=Bounds.seconds, help="of one process, at most")
    parser.add_argument(
        "--memory-gb", type=float, default=Bounds.resident_bytes / 1e9, help="the same for its memory"
    )
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-peers", help="where the others are installed"
    )
    parser.add_argument("--venv-torchstore", type=Path, default=ROOT / ".venv-peers-torchstore")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    end_in_order_when_told()
    keys = arguments.only.split(",") if arguments.only else list(BY_KEY)
    if unknown := [key for key in keys if key not in BY_KEY]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(BY_KEY)}")
    pythons = {
        OURS: Path(sys.executable),
        PEERS: arguments.venv.absolute() / "bin/python",
        TORCHSTORE: arguments.venv_torchstore.absolute() / "bin/python",
    }
    size = QUICK_BYTES if arguments.quick and arguments.size is None else arguments.size
    width = WIDTH if size is None else width_of(size)
    starts, rounds = (1, 2) if arguments.quick else (arguments.starts, arguments.rounds)
    bounds = Bounds(seconds=arguments.seconds, resident_bytes=int(arguments.memory_gb * 1e9))
    entries = [entry for entry in CATALOGUE if entry.key in keys]
    found = compare(entries, pythons, width, starts, rounds, bounds)
    results = {"side_by_side": found}
    sides = [side_of(row) for row in found]
    processes = [start for row in found for start in row["starts"]]
    print_sides(
        sides,
        [seconds for process in processes for seconds in process["memcpy_s"]],
        processes[0]["state_bytes"] if processes else 0,
    )
    path = write_results(arguments.out, results, "-peers")
    path.with_suffix(".md").write_text(markdown(sides))
    print(f"every round: {path}")


if __name__ == "__main__":
    main()
