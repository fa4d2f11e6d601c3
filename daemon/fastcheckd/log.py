"""Log lines on stderr, one per event: for people, or as JSON for a collector.

A line is one line and not endless, whatever is logged: a name or an error from elsewhere can neither forge a second
one nor fill a disk. Fields and their meaning: docs/operations.md.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable

#: Characters of a message, and of a traceback; what is longer is cut in the middle, as both ends tell something.
FIELD_CHARS_MAX = 8192
_CUT = " ...cut... "
#: Strangers may knock as often as they like: they do not fill the log.
COMPLAINTS_MAX = 5
COMPLAINTS_PERIOD_S = 10.0
#: A problem that lasts is told again so often.
EPISODE_REPEAT_S = 30.0


def bounded(text: str) -> str:
    """At most `FIELD_CHARS_MAX` of it."""
    if len(text) <= FIELD_CHARS_MAX:
        return text
    half = (FIELD_CHARS_MAX - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


class Complaints:
    """Lines about those who knock at a port, at most `COMPLAINTS_MAX` per period; how many more there were is said.

    May be used from any thread.

    Args:
        logger: whose lines they are.
        about: what they begin with.
    """

    def __init__(
        self,
        logger: logging.Logger,
        about: str,
        level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._about = about
        self._level = level
        self._clock = clock
        self._lock = threading.Lock()
        self._since = -COMPLAINTS_PERIOD_S
        self._count = 0

    def add(self, text: str, *values: object) -> None:
        """Log one, or only count it; `text` and `values` as for a logger."""
        with self._lock:
            now, untold = self._clock(), 0
            if now - self._since >= COMPLAINTS_PERIOD_S:
                untold = max(0, self._count - COMPLAINTS_MAX)
                self._since, self._count = now, 0
            self._count += 1
            told = self._count <= COMPLAINTS_MAX
        if untold:
            self._logger.log(self._level, "%s: %d more of such lines before", self._about, untold)
        if told:
            self._logger.log(self._level, f"{self._about}: {text}", *values)


class Episode:
    """Lines about a problem that lasts: when it begins, with a count while it goes on, and when it is over.

    May be used from one thread.

    Args:
        about: what each line begins with.
        repeat_s: at most one line in so long a time while it goes on.
    """

    def __init__(
        self,
        logger: logging.Logger,
        about: str,
        *,
        level: int = logging.WARNING,
        repeat_s: float = EPISODE_REPEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._about = about
        self._level = level
        self._repeat_s = repeat_s
        self._clock = clock
        self._began_at = self._told_at = 0.0
        #: How often it has happened since it began; 0: it is over.
        self.count = 0

    def again(self, text: str, *values: object) -> None:
        """It has happened, for the first time or once more; `text` and `values` as for a logger."""
        now = self._clock()
        self.count += 1
        if self.count == 1:
            self._began_at = self._told_at = now
            self._logger.log(self._level, f"%s: {text}", self._about, *values)
        elif now - self._told_at >= self._repeat_s:
            self._told_at = now
            self._logger.log(
                self._level,
                f"%s: {text} (%d times within %.0f s)",
                self._about,
                *values,
                self.count,
                now - self._began_at,
            )

    def over(self) -> None:
        """It is well again; nothing if it was."""
        if self.count:
            lasted_s = self._clock() - self._began_at
            self._logger.log(
                self._level, "%s: over after %.1f s (%d times)", self._about, lasted_s, self.count
            )
            self.count = 0


class JsonLines(logging.Formatter):
    """One JSON object per event.

    Args:
        node_id, process: whose log it is.
    """

    def __init__(self, node_id: str, process: str) -> None:
        super().__init__()
        self._who = {"node": node_id, "process": process}

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._who,
            "logger": record.name,
            "message": bounded(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = bounded(self.formatException(record.exc_info))
        return json.dumps(line)


class HumanLines(logging.Formatter):
    """Time, level, who, message; a traceback follows on lines of its own."""

    def __init__(self, node_id: str, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname).1s {node_id}/{process}: %(message)s", "%H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class' name
        """The line without a traceback."""
        record.message = bounded(record.message).replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802  as above
        """The traceback."""
        return bounded(super().formatException(ei))  # type: ignore[arg-type]  # what the base class is given


def configure(log_format: str, node_id: str, process: str) -> None:
    """Send all loggers to stderr.

    Args:
        log_format: `human` or `json`.
        process: parent, agent, data or registry.
    """
    lines = JsonLines if log_format == "json" else HumanLines
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines(node_id, process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
