"""`python -m tests.simulation --seeds FIRST-LAST [--jobs N]`: run seeds; stop at the first that breaks a promise."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.many import run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="1-1000", help="FIRST-LAST, or one seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--trace", action="store_true", help="print the trace of a good seed, too")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    started = time.monotonic()
    counted = "commits loads puts lookups repairs deletions elections cuts snapshots full_disks"
    totals = dict.fromkeys(counted.split(), 0)
    virtual_s, done = 0.0, 0
    for outcome in run_seeds(seeds, options.jobs):
        done += 1
        virtual_s += outcome.virtual_s
        for key in totals:
            totals[key] += getattr(outcome, key)
        if outcome.violation is not None or (options.trace and len(seeds) == 1):
            print("\n".join(outcome.trace))
        if outcome.violation is not None:
            print(f"seed {outcome.seed}: {outcome.violation}")
            print(f"replay it with: python -m tests.simulation --seeds {outcome.seed}")
            return 1
    elapsed_s = time.monotonic() - started
    counts = ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in totals.items())
    print(
        f"{done} seeds in {elapsed_s:.1f} s, {done / elapsed_s:.1f} a second, "
        f"{virtual_s / 3600:.2f} hours of cluster time, {counts}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
