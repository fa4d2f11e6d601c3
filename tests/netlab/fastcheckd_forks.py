"""A daemon in a network namespace, as a fork of a process that has imported it: half a second of a core less for each.

`tests.forks` preloads this module; the processes' command line tells that they are daemons by its name.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

from tests.netlab.namespaces import enter

from fastcheckd.main import main, settle_grpc

# As `fastcheckd.launcher` does before it forks.
settle_grpc()
importlib.import_module("fastcheckd.process.parent")


def run_daemon() -> NoReturn:
    """Be the daemon of a machine: NAMESPACE CONFIG."""
    os.setsid()
    enter(sys.argv[1])
    sys.exit(main(["run", "--config", sys.argv[2]]))
