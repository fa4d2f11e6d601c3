"""Removes networks, daemons and memory of a process that was killed, as `fastcheck.local.reaper` does for a cluster.

`python -m tests.netlab.keeper OWNER_PID` is started by each network. Until its owner is gone it imports nothing more.
"""

from __future__ import annotations

import os
import sys
import time

LOOK_INTERVAL_S = 0.2


def main() -> None:
    """Wait for the owner's end, then clean up."""
    owner = int(sys.argv[1])
    while os.getppid() == owner:
        time.sleep(LOOK_INTERVAL_S)

    from tests.netlab.lab import remove_what_is_left  # noqa: PLC0415  late: see above

    remove_what_is_left()


if __name__ == "__main__":
    main()
