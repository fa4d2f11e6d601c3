import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheckd.errors import ConfigError
from fastcheckd.registry.raft import journal as journal_module
from fastcheckd.registry.raft.disk import Disk
from fastcheckd.registry.raft.journal import MAGIC


def Journal(path, base=None, **more):
    assert path.name == "log"
    return journal_module.Journal(Disk(path.parent), base, **more)


def entries(first, count, term=1):
    return [(b"command-%d" % i, i, term) for i in range(first, first + count)]


def filled(path, count=10, *, synced=True):
    """A log; each entry is on disk before the next one is written, or none is."""
    path.write_bytes(MAGIC)
    journal = Journal(path)
    for entry in entries(1, count):
        journal.add(*entry)
        if synced:
            journal.sync()
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


def test_a_log_of_another_format_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "log"
    filled(path).sync()
    newer = path.read_bytes().replace(MAGIC, b"FCJRNL3\n")
    for data, says in ((newer, "has format '3', this version reads 2"), (b"else", "is not one of ours")):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=says):
            Journal(path)
        assert path.read_bytes() == data


def test_a_broken_entry_that_was_acknowledged_is_for_the_operator_and_nothing_is_changed(tmp_path):
    path = tmp_path / "log"
    filled(path).sync()
    whole = path.read_bytes()
    for at in range(len(MAGIC), len(whole) - 60, 7):
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        path.write_bytes(broken)
        with pytest.raises(
            ConfigError, match=r"is broken at byte .*entries up to .* behind it.*Nothing was changed"
        ):
            Journal(path)
        assert path.read_bytes() == broken
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match="not one of ours"):
        Journal(path)


def test_a_broken_last_entry_is_found_by_what_was_committed(tmp_path):
    path = tmp_path / "log"
    journal = filled(path)
    journal.setRaftCommitIndex(10)
    journal._destroy()
    broken = bytearray(path.read_bytes())
    broken[-1] ^= 1
    path.write_bytes(broken)
    with pytest.raises(ConfigError, match="entry 10 was committed. Nothing was changed"):
        Journal(path)
    assert path.read_bytes() == broken


def test_what_a_power_cut_tore_before_it_was_synced_is_cut_off_wherever_it_is(tmp_path):
    """Of what was written since the last sync any part may be there: also an end without its beginning."""
    path = tmp_path / "log"
    journal = filled(path, 6)
    synced = journal.size_bytes
    for entry in entries(7, 4):
        journal.add(*entry)
    whole = path.read_bytes()
    for at in range(synced, len(whole), 5):
        torn = bytearray(whole)
        torn[at] ^= 0x55
        path.write_bytes(torn)
        kept = Journal(path)
        assert kept[:6] == entries(1, 6) and len(kept) < 10


def test_one_changed_byte_in_term_vote_or_commit_index_is_found(tmp_path):
    journal = filled(tmp_path / "log")
    journal.setCurrentTerm(7, "10.0.0.1:7501")
    journal._destroy()
    meta = tmp_path / "log.meta"
    whole = meta.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        meta.write_bytes(changed)
        try:
            read = Journal(tmp_path / "log")
        except ConfigError:
            continue
        assert (read.getCurrentTerm(), read.getVotedForNodeId()) == (7, "10.0.0.1:7501"), changed


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
    base = (b"command-4", 4, 1), (b"command-5", 5, 1)
    assert Journal(tmp_path / "log", base)[:] == entries(4, 7)
    assert Journal(tmp_path / "log")[:] == entries(4, 7)
    older = (b"command-2", 2, 1), (b"command-3", 3, 1)
    with pytest.raises(ConfigError, match="it is an older one. Nothing was changed"):
        Journal(tmp_path / "log", older)
    other = (b"another", 5, 3), (b"and-one", 6, 3)
    assert Journal(tmp_path / "log", other)[:] == list(other)


@pytest.mark.parametrize("broken", ["append", "replace"])
def test_a_full_disk_ends_it_and_a_start_with_room_goes_on(tmp_path, monkeypatch, broken):
    reasons = []
    journal = Journal(tmp_path / "log", on_failure=reasons.append)
    for entry in entries(1, 10):
        journal.add(*entry)
    journal.setCurrentTerm(1, None)
    write = os.write

    def full(descriptor, data):
        write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        journal.add(b"x" * 100, 11, 1) if broken == "append" else journal.setCurrentTerm(2, "h:1")
    monkeypatch.undo()
    for attempt in (journal.sync, lambda: journal.add(b"y", 11, 1), lambda: journal.setCurrentTerm(2, None)):
        with pytest.raises(OSError, match="No space"):
            attempt()
    assert len(reasons) == 1 and "No space left on device" in reasons[0] and "free some space" in reasons[0]
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.meta"}, "no half file keeps the room"
    again = Journal(tmp_path / "log")
    assert again[:] == entries(1, 10) and again.getCurrentTerm() == 1
    again.add(b"command-11", 11, 1)
    again.sync()
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
