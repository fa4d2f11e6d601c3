"""One candidate in this process.

`python -m tests.benchmarks.peers.child KEY MEMORY_FOLDER DISK_FOLDER WIDTH ROUNDS RESULT_FILE` is what the runner
starts. The result is a file and not what is printed, since libraries print. It is written
in both cases: rounds, or a reason.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..workload import gpt2_state
from .candidate import Places
from .catalogue import BY_KEY, Entry
from .rounds import measure


def version(package: str) -> str:
    """Of a distribution in this process' environment."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def run(entry: Entry, places: Places, width: int, rounds: int) -> dict[str, Any]:
    """Make it, measure it, close it; whatever it raises is the reason why it was not run."""
    result: dict[str, Any] = {"versions": {name: version(name) for name in entry.packages}}
    try:
        state = gpt2_state(width=width)
        candidate = entry.make(places, state)
        try:
            found = measure(candidate, state, rounds, _say)
        finally:
            candidate.close()
    except Exception as error:  # noqa: BLE001  a library may raise anything; the table shows what
        traceback.print_exc()
        return result | {"reason": reason(error)}
    return result | {"rounds": dataclasses.asdict(found)}


def reason(error: BaseException) -> str:
    """One line about what was raised."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Run it and write the result, whole or not at all."""
    key, memory, disk, width, rounds, result_file = arguments
    result = run(BY_KEY[key], Places(Path(memory), Path(disk)), int(width), int(rounds))
    new = Path(result_file).with_suffix(".new")
    new.write_text(json.dumps(result))
    new.replace(result_file)


if __name__ == "__main__":
    main(sys.argv[1:])
