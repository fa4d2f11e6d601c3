"""What every benchmark that is started from a shell has in common: how it ends, and the file that it leaves."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from .machine import describe

#: As a shell counts it: 128 + SIGTERM.
TERMINATED = 143


def end_in_order_when_told() -> None:
    """SIGTERM unwinds like an exception, so clusters, namespaces and folders are gone afterwards."""

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # `timeout` sends it to the whole group, some send it twice
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, end)


def write_results(folder: Path, results: Mapping[str, Any], suffix: str = "") -> Path:
    """Write one run as JSON: machine, versions, command, everything measured. The file is named by the moment.

    Args:
        suffix: of the file's name, before `.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / time.strftime(f"%Y%m%d-%H%M%S{suffix}.json")
    # Folders of this machine mean nothing elsewhere.
    arguments = [Path(said).name if Path(said).is_absolute() else said for said in sys.argv[1:]]
    written = {"machine": describe(), "arguments": arguments, **results}
    path.write_text(json.dumps(written, indent=2) + "\n")
    return path
