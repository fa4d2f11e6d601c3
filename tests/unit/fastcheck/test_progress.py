"""What a load tells while it lasts: to a callback, on a terminal, or nobody."""

import io

import pytest

from fastcheck import LoadProgress
from fastcheck.progress import QUIET_S, CallbackFailedError, Reporter
from fastcheck_proto.v1 import trainer_pb2 as pb

NEWS = pb.LoadProgress(bytes_done=1_200_000_000, bytes_total=1_500_000_000, bytes_per_s=450e6, holders=3)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_callback_hears_all_news_and_the_end():
    heard, clock = [], Clock()
    terminal = Terminal()
    reporter = Reporter(heard.append, terminal, clock)
    clock.now = 3.0
    reporter.news(NEWS)
    reporter.all_here(1_500_000_000, 3)
    reporter.close()
    assert heard == [
        LoadProgress(1_200_000_000, 1_500_000_000, 450e6, 3),
        LoadProgress(1_500_000_000, 1_500_000_000, 500e6, 3),
    ]
    assert not terminal.getvalue(), "the caller shows it"


def test_what_a_callback_raises_comes_out_as_the_cause():
    reporter = Reporter(lambda _: 1 / 0)
    with pytest.raises(CallbackFailedError) as caught:
        reporter.news(NEWS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_terminal_shows_one_line_that_rewrites_itself_once_the_load_lasts():
    terminal, clock = Terminal(), Clock()
    reporter = Reporter(None, terminal, clock)
    clock.now = QUIET_S / 2
    reporter.news(NEWS)
    assert not terminal.getvalue()
    clock.now = QUIET_S + 1
    reporter.news(NEWS)
    reporter.news(NEWS)
    reporter.close()
    reporter.close()
    line = "FastCheck loads 1.20 of 1.50 GB from 3 nodes, 450 MB/s"
    assert terminal.getvalue() == f"\r\x1b[K{line}\r\x1b[K{line}\n"


def test_nothing_is_written_to_what_is_no_terminal():
    for stream in (io.StringIO(), object()):
        clock = Clock()
        reporter = Reporter(None, stream, clock)
        clock.now = 10.0
        reporter.news(NEWS)
        reporter.all_here(1_500_000_000, 3)
        reporter.close()
        if isinstance(stream, io.StringIO):
            assert not stream.getvalue()
