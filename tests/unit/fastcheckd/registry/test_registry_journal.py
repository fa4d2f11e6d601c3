import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheckd.errors import ConfigError
from fastcheckd.registry.journal import MAGIC, Journal


def entries(first, count, term=1):
    return [(b"command-%d" % i, i, term) for i in range(first, first + count)]


def filled(path, count=10):
    journal = Journal(path)
    for entry in entries(1, count):
        journal.add(*entry)
    journal.setCurrentTerm(1, None)
    return journal


def test_what_was_appended_is_there_again(tmp_path):
    journal = filled(tmp_path / "log")
    journal.setCurrentTerm(7, "peer:1")
    journal.setRaftCommitIndex(9)
    journal._destroy()
    again = Journal(tmp_path / "log")
    assert again[:] == entries(1, 10) and again[-1] == (b"command-10", 10, 1)
    assert (again.getCurrentTerm(), again.getVotedForNodeId(), again.getRaftCommitIndex()) == (7, "peer:1", 9)


def test_a_torn_tail_is_cut_off_and_writing_goes_on(tmp_path):
    path = tmp_path / "log"
    filled(path).sync()
    whole = path.read_bytes()
    for cut in (1, 5, 30, 60):
        path.write_bytes(whole[:-cut])
        journal = Journal(path)
        kept = len(journal)
        assert journal[:] == entries(1, 10)[:kept] and 8 <= kept < 10
        journal.add(b"next", kept + 1, 2)
        journal.sync()
        assert Journal(path)[-1] == (b"next", kept + 1, 2)


def test_losing_committed_entries_is_for_the_operator(tmp_path):
    path = tmp_path / "log"
    journal = filled(path)
    journal.setRaftCommitIndex(10)
    journal._destroy()
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="was committed"):
        Journal(path)
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match="not one of ours"):
        Journal(path)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"term": "x"}'])
def test_a_log_without_its_term_and_vote_is_not_used(tmp_path, content):
    filled(tmp_path / "log")._destroy()
    meta = tmp_path / "log.meta"
    meta.unlink()
    if content is not None:
        meta.write_bytes(content)
    with pytest.raises(ConfigError, match="new raft_address"):
        Journal(tmp_path / "log")


def test_the_log_is_aligned_with_a_snapshot(tmp_path):
    """A crash between writing the snapshot and shortening the log must not cost what follows the snapshot."""
    filled(tmp_path / "log")._destroy()
    journal = Journal(tmp_path / "log", base=(b"command-4", 4, 1))
    assert journal[:] == entries(4, 7)
    assert Journal(tmp_path / "log")[:] == entries(4, 7)
    assert len(Journal(tmp_path / "log", base=(b"another", 5, 3))) == 0


def test_a_failed_append_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    journal = filled(tmp_path / "log")
    size = journal.size_bytes

    class FullDisk:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            self._file.write(data[:5])
            self._file.flush()
            raise OSError(errno.ENOSPC, "no space left")

        def __getattr__(self, name):
            return getattr(self._file, name)

    journal._file = FullDisk(journal._file)
    with pytest.raises(OSError, match="no space"):
        journal.add(b"x" * 100, 11, 1)
    assert len(journal) == 10 and journal.size_bytes == size
    journal.add(b"command-11", 11, 1)
    journal.sync()
    assert Journal(tmp_path / "log")[:] == entries(1, 11)


def test_after_a_failed_sync_nothing_is_acknowledged_any_more(tmp_path, monkeypatch):
    reasons = []
    journal = Journal(tmp_path / "log", on_failure=reasons.append)
    journal.add(b"one", 1, 1)

    def broken(_descriptor):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(OSError, match="input/output"):
        journal.sync()
    monkeypatch.undo()
    for attempt in (journal.sync, lambda: journal.add(b"two", 2, 1), lambda: journal.setRaftCommitIndex(1)):
        with pytest.raises(OSError, match="input/output"):
            attempt()
    assert len(reasons) == 1


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.binary(max_size=50)),
        st.tuples(st.just("cut"), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(operations)
def test_the_file_says_what_the_memory_says(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("journal") / "log"
    journal, model, term = Journal(path), [], 1
    journal.setCurrentTerm(1, None)
    for what, value in steps:
        if what == "add":
            index = model[-1][1] + 1 if model else 1
            journal.add(value, index, term)
            model.append((value, index, term))
        elif what == "cut":
            term += 1
            journal.deleteEntriesFrom(max(0, len(model) - value))
            del model[max(0, len(model) - value) :]
        elif what == "drop":
            journal.deleteEntriesTo(min(value, len(model)))
            del model[: min(value, len(model))]
        else:
            journal._destroy()
            journal = Journal(path)
        assert journal[:] == model and len(journal) == len(model)
    journal._destroy()
    assert Journal(path)[:] == model
    assert json.loads(path.with_name("log.meta").read_bytes())["term"] == 1
