"""Log lines on stderr, one per event: for people, or as JSON for a collector."""

from __future__ import annotations

import json
import logging
import sys
import time


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(log_format: str, process: str) -> None:
    """Send all loggers to stderr; `process` names the agent, data or registry in human lines."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_Json())
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname).1s {process}: %(message)s", "%H:%M:%S")
        )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
