"""The admin CLI. Its entry point imports nothing heavy, so that a thin install can say which package is missing."""

from __future__ import annotations

import sys

_NEEDED = {"click", "rich", "yaml", "psutil"}


def main() -> None:
    """Run the command line, or say which extra is missing."""
    try:
        from .app import cli  # noqa: PLC0415  click and rich come with an extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        sys.stderr.write(
            f"fastcheck: the command line needs {error.name}, which is not installed; "
            "run: pip install 'fastcheck[cli]'\n"
        )
        sys.exit(1)
    cli(prog_name="fastcheck")
