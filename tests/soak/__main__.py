"""`make soak MINUTES=10 SEED=…`: faults fall on five nodes while a job of three ranks trains; then the account."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.soak.run import soak


def main() -> int:
    """Run it, print the account as JSON, and fail if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="replays the same faults; drawn otherwise")
    parser.add_argument("--dir", type=Path, default=None, help="where the logs stay")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    folder = options.dir or Path(tempfile.mkdtemp(prefix="fastcheck-soak-"))
    account = soak(
        options.minutes * 60, seed, folder, say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(json.dumps(account.as_json(), indent=2))
    return 1 if account.violations else 0


if __name__ == "__main__":
    sys.exit(main())
