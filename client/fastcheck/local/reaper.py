"""Takes a cluster down when the process that owns it is gone, however it ended.

A killed process cannot clean up after itself, and the daemons of an abandoned cluster would keep cores and memory. So a
separate process waits for the owner's end, and then does what the owner would have done: `down`, RAM included.

    python reaper.py OWNER_PID DIR

It is run by its path and imports nothing of FastCheck until then, so it is small and starts at once. It polls its
parent's id: the kernel's own signal (`PR_SET_PDEATHSIG`) is sent when the thread that started it ends, and a pipe would
also be held by every process that the owner forks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LOOK_INTERVAL_S = 0.2
LOG_NAME = "reaper.log"


def start_reaper(cluster_dir: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one for this process, in a session of its own: what ends the owner's group is not to end it as well."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__, str(os.getpid()), str(cluster_dir)],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a pipe to somebody would keep them waiting; it has a log
        env=dict(environment),
        start_new_session=True,
    )


def main() -> None:
    """Wait for the owner's end, then take the cluster down. Says what it did in the cluster's folder."""
    owner, cluster_dir = int(sys.argv[1]), Path(sys.argv[2])
    while os.getppid() == owner:
        time.sleep(LOOK_INTERVAL_S)
    if not cluster_dir.is_dir():
        return
    with (cluster_dir / LOG_NAME).open("a", buffering=1) as log:
        sys.stderr = log  # a traceback, too

        def say(text: str) -> None:
            log.write(f"{text}\n")

        say(f"process {owner} ended without taking its cluster down")

        from fastcheck.local import LocalCluster  # noqa: PLC0415  late: see above

        LocalCluster(cluster_dir, on_event=say).down()


if __name__ == "__main__":
    main()
