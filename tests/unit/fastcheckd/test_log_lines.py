"""Whatever is logged is one line, bounded, and says whose it is."""

import json
import logging
import sys

import pytest

from fastcheckd.log import (
    COMPLAINTS_MAX,
    COMPLAINTS_PERIOD_S,
    FIELD_CHARS_MAX,
    Complaints,
    Episode,
    HumanLines,
    JsonLines,
)


def record(message, *args, level=logging.INFO, exc_info=None):
    made = logging.LogRecord("fastcheckd.save", level, "room.py", 1, message, args, exc_info)
    made.created, made.msecs = 1_700_000_000.0, 7.0
    return made


def raised(text):
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def test_a_json_line_says_when_who_and_what():
    line = JsonLines("n1", "data").format(record("step %d of %s", 3, "gpt", level=logging.WARNING))
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.007Z",
        "level": "warning",
        "node": "n1",
        "process": "data",
        "logger": "fastcheckd.save",
        "message": "step 3 of gpt",
    }


def test_a_human_line():
    line = HumanLines("n1", "data").format(record("step %d", 3, level=logging.WARNING))
    assert line.endswith(".007 W n1/data: step 3")


@pytest.mark.parametrize("lines", [JsonLines, HumanLines])
def test_a_message_cannot_forge_a_second_line(lines):
    line = lines("n1", "data").format(record("peer said %s", "x\r\n00:00:00.000 E n1/data: forged"))
    assert "\n" not in line and "\r" not in line
    assert "forged" in line


@pytest.mark.parametrize("lines", [JsonLines, HumanLines])
def test_a_message_and_a_traceback_are_bounded_and_keep_both_ends(lines):
    line = lines("n1", "data").format(record("begin %s end", "x" * 10**6))
    assert FIELD_CHARS_MAX < len(line) < FIELD_CHARS_MAX + 300
    assert "begin xxx" in line and "xxx end" in line
    line = lines("n1", "data").format(record("failed", exc_info=raised("y" * 10**6)))
    assert len(line) < FIELD_CHARS_MAX + 600
    assert "Traceback" in line and "yyy ...cut... yyy" in line


def test_a_traceback_is_a_field_of_its_line():
    line = JsonLines("n1", "agent").format(record("failed", exc_info=raised("why")))
    assert "\n" not in line
    assert json.loads(line)["traceback"].endswith("ValueError: why")


def test_of_a_thousand_complaints_the_first_are_told_and_the_others_counted(caplog):
    now = [100.0]
    complaints = Complaints(logging.getLogger("t"), "lane", clock=lambda: now[0])
    for i in range(1000):
        complaints.add("closed %s", i)
    assert [r.getMessage() for r in caplog.records] == [f"lane: closed {i}" for i in range(COMPLAINTS_MAX)]
    caplog.clear()
    now[0] += COMPLAINTS_PERIOD_S
    complaints.add("closed %s", "one more")
    told = [r.getMessage() for r in caplog.records]
    assert told == [f"lane: {1000 - COMPLAINTS_MAX} more of such lines before", "lane: closed one more"]


def test_a_problem_that_lasts_is_told_when_it_begins_now_and_then_and_when_it_is_over(caplog):
    now = [100.0]
    episode = Episode(logging.getLogger("t"), "saving", repeat_s=30.0, clock=lambda: now[0])
    episode.over()
    assert not caplog.records
    for second in range(41):
        now[0] = 100.0 + second
        episode.again("no room for step %d", second)
    episode.over()
    episode.over()
    episode.again("no room for step %d", 50)
    assert [r.getMessage() for r in caplog.records] == [
        "saving: no room for step 0",
        "saving: no room for step 30 (31 times within 30 s)",
        "saving: over after 40.0 s (41 times)",
        "saving: no room for step 50",
    ]
