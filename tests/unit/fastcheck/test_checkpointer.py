"""What a training loop sees of saves and loads through shared memory, in good times and in bad ones."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from fake_daemon import FakeDaemon
from tests.eventually import until

from fastcheck import (
    Checkpointer,
    ClosedError,
    CorruptError,
    DaemonUnavailableError,
    FastCheckError,
    FencedError,
    InvalidArgumentError,
    LoadFailedError,
    LostError,
    OutOfMemoryError,
    RegistryUnavailableError,
    SaveFailedError,
    SaveTimeoutError,
    StateMismatchError,
    StepNotFoundError,
    SupersededError,
    UnsupportedStateError,
    WorldSizeError,
    errors,
)
from fastcheck import connection as connection_module
from fastcheck import session as session_module
from fastcheck import session_stream as stream_module
from fastcheck.segments import MappedSegment
from fastcheck.state.flatten import flatten
from fastcheck_proto.v1 import common_pb2, trainer_pb2

STATE_BYTES = 40_000


def make_state(value: float = 0.0) -> dict:
    return {"w": torch.full((STATE_BYTES // 4,), float(value)), "n": int(value)}


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as running:
        yield running


@pytest.fixture
def ckpt(daemon):
    with Checkpointer(job="gpt", address=daemon.address) as made:
        yield made


def test_save_then_load(daemon, ckpt):
    handle = ckpt.save(3, make_state(7))
    assert handle.result(timeout=60) is handle
    assert handle.staged
    assert handle.replicated
    assert handle.committed
    assert handle.done
    assert handle.exception() is None
    assert handle.step == 3
    state = make_state()
    held = state["w"]
    assert ckpt.load(state) == 3
    assert state["w"] is held
    assert held.eq(7).all()
    assert state["n"] == 7
    assert ckpt.steps() == [3]


def test_stats_tell_what_happened(ckpt):
    stats = ckpt.save(1, make_state()).result(timeout=60).stats
    assert stats["bytes"] == flatten(make_state()).state_bytes
    assert stats["waited_s"] > 0, "for the first segment"
    assert stats["stage_s"] > 0
    assert (stats["encoded_bytes"], stats["replicate_s"], stats["commit_s"], stats["copies"]) == (
        7,
        0.1,
        0.2,
        1,
    )
    assert stats["resent_shards"] == 0
    with pytest.raises(TypeError):
        stats["bytes"] = 0


def test_nothing_to_load_is_none_and_an_absent_step_is_an_error(ckpt):
    assert ckpt.load(make_state()) is None
    assert ckpt.steps() == []
    with pytest.raises(StepNotFoundError, match="step 9"):
        ckpt.load(make_state(), step=9)


def test_an_asked_for_step_is_loaded(ckpt):
    for step in (1, 2):
        ckpt.save(step, make_state(step)).result(timeout=60)
    state = make_state()
    assert ckpt.load(state, step=1) == 1
    assert state["n"] == 1
    assert ckpt.load(state) == 2
    assert state["n"] == 2


def test_the_state_may_change_as_soon_as_save_returns(daemon, ckpt):
    state = make_state(1)
    handle = ckpt.save(1, state)
    state["w"].fill_(99)
    handle.result(timeout=60)
    other = make_state()
    ckpt.load(other)
    assert other["w"].eq(1).all()


def test_nothing_loaded_changes_when_the_daemon_reuses_the_segment(daemon, ckpt):
    net = torch.nn.Linear(64, 64)
    weight = net.weight.detach().clone()
    ckpt.save(1, {"m": net}).result(timeout=60)
    again = torch.nn.Linear(64, 64)
    ckpt.load({"m": again})
    for saved in daemon.memory.saves.values():
        with saved.path.open("r+b") as file:
            file.write(b"\xa5" * saved.path.stat().st_size)
    assert torch.equal(again.weight, weight)


def test_the_segment_is_held_until_the_load_is_over_and_no_longer(daemon, ckpt):
    ckpt.save(1, make_state()).result(timeout=60)

    class Looks:
        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            self.seen = "Load closed" in daemon.calls

    ckpt.save(2, {"x": Looks()}).result(timeout=60)
    looks = Looks()
    ckpt.load({"x": looks})
    assert not looks.seen
    until(lambda: "Load closed" in daemon.calls)


def test_a_large_state_is_copied_by_several_threads(daemon):
    state = {str(i): torch.randn(5_000_000) for i in range(3)}
    wanted = {k: v.clone() for k, v in state.items()}
    with Checkpointer(job="gpt", address=daemon.address, copy_threads=3) as ckpt:
        ckpt.save(1, state).result(timeout=30)
        back = {k: torch.zeros_like(v) for k, v in state.items()}
        assert ckpt.load(back) == 1
    assert all(torch.equal(back[k], wanted[k]) for k in wanted)
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("fastcheck")])


def test_mappings_are_kept_while_the_file_stays_and_renewed_when_it_is_replaced(daemon, ckpt):
    daemon.memory.segment_reuse = True
    ckpt.save(1, make_state(1)).result(timeout=60)
    cache = ckpt._transport._cache
    first = next(iter(cache._segments.values()))
    ckpt.save(2, make_state(2)).result(timeout=60)
    assert next(iter(cache._segments.values())) is first
    path = daemon.memory.by_step(2).path
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))
    ckpt.save(3, make_state(3)).result(timeout=60)
    assert next(iter(cache._segments.values())) is not first
    state = make_state()
    ckpt.load(state)
    assert state["n"] == 3


@pytest.fixture
def releases(monkeypatch):
    """What each unmapping of a loaded segment returned: True when nothing viewed it any more."""
    seen: list[bool] = []
    release = MappedSegment.release

    def spy(self):
        seen.append(release(self))
        return seen[-1]

    monkeypatch.setattr(MappedSegment, "release", spy)
    return seen


def test_nothing_views_the_segment_after_a_load(ckpt, releases):
    def make():
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        net(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        return {"net": net, "optimizer": optimizer, "scheduler": scheduler, "list": [torch.ones(3), 1]}

    ckpt.save(1, make()).result(timeout=60)
    assert ckpt.load(make()) == 1
    until(lambda: releases == [True])


class Hides(torch.nn.Module):
    """Keeps what it is given where nobody looks."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((5000,), 3.0))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.hidden = state_dict[prefix + "weight"]


def test_a_view_that_was_hidden_does_not_change_when_the_segment_is_reused(daemon, ckpt, releases):
    ckpt.save(1, {"m": Hides()}).result(timeout=60)
    module = Hides()
    ckpt.load({"m": module})
    until(lambda: releases == [False])
    path = daemon.memory.by_step(1).path
    with path.open("r+b") as file:
        file.write(b"\xa5" * path.stat().st_size)
    assert module.hidden.eq(3).all()


# What the caller gets wrong raises at once.


def test_the_callers_mistakes_raise(daemon, ckpt):
    with pytest.raises(UnsupportedStateError, match=r"state\['f'\]"):
        ckpt.save(1, {"f": print})
    for step in (-1, 2**63, 1.5, True, "1", None):
        with pytest.raises(InvalidArgumentError, match="step"):
            ckpt.save(step, {})
    with pytest.raises(InvalidArgumentError):
        ckpt.load({}, step=-1)
    assert daemon.calls == []


def test_a_mismatch_raises_and_changes_nothing(ckpt):
    ckpt.save(1, make_state(5)).result(timeout=60)
    state = {"w": torch.zeros(STATE_BYTES // 4), "n": 0, "other": 1}
    with pytest.raises(StateMismatchError):
        ckpt.load(state)
    assert not state["w"].any()


def test_use_after_close_raises(daemon):
    ckpt = Checkpointer(job="gpt", address=daemon.address)
    ckpt.save(1, make_state()).result(timeout=60)
    ckpt.close()
    ckpt.close()
    for use in (lambda: ckpt.save(2, {}), lambda: ckpt.load({}), ckpt.steps):
        with pytest.raises(ClosedError):
            use()


def test_close_says_that_the_rank_is_done_and_never_waits_for_who_is_not_there(daemon):
    with Checkpointer(job="gpt", rank=1, world_size=2, address=daemon.address) as ckpt:
        ckpt.save(1, make_state()).result(timeout=60)
    assert daemon.memory.closed == [("gpt", 1, 1)]
    Checkpointer(job="gpt", address=daemon.address).close()
    assert len(daemon.memory.closed) == 1, "it had no session"
    ckpt = Checkpointer(job="gpt", address=daemon.address)
    ckpt.save(2, make_state()).result(timeout=60)
    daemon.stop()
    ckpt.close()


# What others get wrong is in the handle.


@pytest.mark.parametrize("call", ["Session", "reserve", "sealed"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("OVER_BUDGET", OutOfMemoryError),
        ("JOB_BUDGET", OutOfMemoryError),
        ("FENCED", FencedError),
        ("INCARNATION_OVER", FencedError),
        ("NO_QUORUM", RegistryUnavailableError),
        ("WORLD_SIZE", WorldSizeError),
        ("NOT_FOUND", SaveFailedError),
        ("INTERNAL", SaveFailedError),
    ],
)
def test_a_refusal_is_in_the_handle(daemon, ckpt, call, code, kind):
    daemon.refuse[call] = (getattr(common_pb2, f"ERROR_CODE_{code}"), "sorry")
    handle = ckpt.save(1, make_state())
    with pytest.raises(kind, match="sorry"):
        handle.result(timeout=60)
    assert isinstance(handle.exception(), kind)
    assert handle.done
    assert not handle.committed
    assert handle.staged == (call == "sealed")
    daemon.refuse.clear()
    # Who is away is tried again in the background.
    until(lambda: ckpt.save(2, make_state()).exception(timeout=60) is None)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("SUPERSEDED", SupersededError), ("HOLDER_LOST", SaveFailedError), ("LOST", SaveFailedError)],
)
def test_a_save_that_fails_later_says_why(tmp_path, code, kind):
    with (
        FakeDaemon(tmp_path, auto_commit=False) as daemon,
        Checkpointer("gpt", address=daemon.address) as ckpt,
    ):
        handle = ckpt.save(1, make_state())
        with pytest.raises(SaveTimeoutError, match="staged, not replicated yet") as caught:
            handle.result(timeout=0.01)
        assert isinstance(caught.value, TimeoutError)
        daemon.memory.tell(1, state=trainer_pb2.SAVE_STATE_REPLICATED)
        until(lambda: handle.replicated)
        assert not handle.committed
        assert not handle.done
        detail = common_pb2.ErrorDetail(code=getattr(common_pb2, f"ERROR_CODE_{code}"), message="told you")
        daemon.memory.tell(1, state=trainer_pb2.SAVE_STATE_FAILED, error=detail)
        with pytest.raises(kind, match="told you"):
            handle.result(timeout=60)


def test_a_segment_that_makes_no_sense_fails_the_save_and_nothing_is_written_elsewhere(tmp_path):
    real = tmp_path / "real"
    real.write_bytes(bytes(65536))
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for name, kind in [
        ("link", DaemonUnavailableError),
        ("short", SaveFailedError),
        ("none", DaemonUnavailableError),
        ("folder", DaemonUnavailableError),
    ]:
        with FakeDaemon(tmp_path) as daemon, Checkpointer(job="gpt", address=daemon.address) as ckpt:
            nonsense = trainer_pb2.SegmentRef(path=str(tmp_path / name), bytes=65536)
            daemon.instead_of = lambda _ref, nonsense=nonsense: nonsense
            handle = ckpt.save(1, make_state())
            assert isinstance(handle.exception(timeout=60), kind), name
            assert not daemon.memory.all_sealed()
    assert real.read_bytes() == bytes(65536)


def test_a_load_whose_answer_makes_no_sense_is_refused(daemon, ckpt):
    ckpt.save(1, make_state(1)).result(timeout=60)
    saved = daemon.memory.by_step(1)
    state = make_state()
    saved.sealed.header_offset += 1
    with pytest.raises(CorruptError):
        ckpt.load(state)
    saved.sealed.header_offset = 2**63
    with pytest.raises(CorruptError):
        ckpt.load(state)
    assert not state["w"].any()


@pytest.mark.parametrize("call", ["Session", "Load"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("LOST", LostError),
        ("CORRUPT", CorruptError),
        ("NO_QUORUM", RegistryUnavailableError),
        ("OVER_BUDGET", OutOfMemoryError),
    ],
)
def test_a_refused_load_raises(daemon, ckpt, call, code, kind):
    daemon.refuse[call] = (getattr(common_pb2, f"ERROR_CODE_{code}"), "sorry")
    with pytest.raises(kind, match="sorry"):
        ckpt.load(make_state())


def test_a_step_of_other_ranks_is_read_in_parts(daemon, ckpt):
    daemon.refuse["Load"] = (common_pb2.ERROR_CODE_WORLD_SIZE, "saved by others")
    daemon.refuse["Read"] = (common_pb2.ERROR_CODE_LOST, "sorry")
    with pytest.raises(LostError, match="sorry"):
        ckpt.load(make_state())
    daemon.refuse["Session"] = (common_pb2.ERROR_CODE_WORLD_SIZE, "another rank said otherwise")
    with (
        Checkpointer("other", address=daemon.address) as other,
        pytest.raises(WorldSizeError, match="said otherwise"),
    ):
        other.load(make_state())


def test_peers_out_of_reach_during_a_load_are_a_failed_load(daemon, ckpt):
    daemon.refuse["Load"] = (common_pb2.ERROR_CODE_UNREACHABLE, "peers are gone")
    with pytest.raises(LoadFailedError, match="peers are gone"):
        ckpt.load(make_state())


def test_warnings_come_once_per_kind(daemon, ckpt, caplog):
    daemon.refuse["reserve"] = (common_pb2.ERROR_CODE_OVER_BUDGET, "full")
    with caplog.at_level(logging.WARNING, logger="fastcheck"):
        for step in range(3):
            assert ckpt.save(step, make_state()).exception(timeout=60)
        daemon.refuse["reserve"] = (common_pb2.ERROR_CODE_FENCED, "old")
        assert ckpt.save(4, make_state()).exception(timeout=60)
    assert [r.message.split("(")[1].split(";")[0] for r in caplog.records] == [
        "OutOfMemoryError",
        "FencedError",
    ]


def test_a_defect_of_ours_does_not_end_the_training_loop(daemon, ckpt, monkeypatch):
    monkeypatch.setattr(ckpt._transport._copier, "copy", lambda *a, **k: 1 / 0)
    handle = ckpt.save(1, make_state())
    with pytest.raises(SaveFailedError, match="ZeroDivisionError"):
        handle.result(timeout=60)
    assert not daemon.memory.all_sealed()
    monkeypatch.undo()
    assert ckpt.save(2, make_state()).result(timeout=60).committed
    assert daemon.memory.by_step(2).segment_id == "save-0", "its segment was not lost"


# No daemon, and daemons that come and go.


def test_without_a_daemon_saves_return_fast_with_the_reason_and_loads_raise(tmp_path):
    with Checkpointer(job="gpt", address=f"unix://{tmp_path}/none.sock", timeout_s=1) as ckpt:
        started = time.monotonic()
        handles = [ckpt.save(step, make_state()) for step in range(50)]
        assert time.monotonic() - started < 25, "a second each"
        for handle in handles:
            assert isinstance(handle.exception(), DaemonUnavailableError)
            with pytest.raises(DaemonUnavailableError, match="fastcheckd running"):
                handle.result()
        with pytest.raises(DaemonUnavailableError):
            ckpt.load(make_state())
        with pytest.raises(DaemonUnavailableError):
            ckpt.steps()


def test_a_daemon_that_is_started_later_is_found(tmp_path):
    with Checkpointer(job="gpt", address=f"unix://{tmp_path}/fastcheckd.sock") as ckpt:
        assert ckpt.save(1, make_state()).exception()
        with FakeDaemon(tmp_path):
            assert ckpt.load(make_state()) is None
            until(lambda: ckpt.save(2, make_state()).exception(timeout=60) is None)


def test_a_handle_survives_a_daemon_restart(tmp_path):
    first = FakeDaemon(tmp_path, auto_commit=False)
    with Checkpointer(job="gpt", address=first.address) as ckpt:
        handle = ckpt.save(1, make_state())
        until(lambda: handle._told)
        first.stop()
        assert not handle.done
        with FakeDaemon(tmp_path, first.memory, auto_commit=False) as second:
            until(lambda: "sealed" in second.calls)
            assert (second.memory.opened[-1].again, second.memory.opened[-1].session) == (True, 1)
            second.memory.commit(1)
            assert handle.result(timeout=60).committed
            assert second.memory.sessions == {ckpt._session.client_id: 1}
            second.auto_commit = True
            until(lambda: ckpt.save(2, make_state()).exception(timeout=60) is None)


def test_a_step_that_a_restarted_daemon_does_not_know_fails_its_handle(tmp_path):
    first = FakeDaemon(tmp_path, auto_commit=False)
    with Checkpointer(job="gpt", address=first.address) as ckpt:
        handle = ckpt.save(1, make_state())
        until(lambda: handle._told)
        first.stop()
        with FakeDaemon(tmp_path), pytest.raises(SaveFailedError, match="no such save"):
            handle.result(timeout=60)


def test_a_handle_fails_when_the_daemon_stays_away(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "_AWAY_S_MAX", 0.3)
    daemon = FakeDaemon(tmp_path, auto_commit=False)
    with Checkpointer(job="gpt", address=daemon.address) as ckpt:
        handle = ckpt.save(1, make_state())
        daemon.stop()
        with pytest.raises(DaemonUnavailableError):
            handle.result(timeout=20)


def test_a_stream_cut_by_a_restart_while_save_copies_fails_that_handle_and_no_other(tmp_path, monkeypatch):
    first = FakeDaemon(tmp_path)
    with Checkpointer(job="gpt", address=first.address) as ckpt:
        ckpt.save(1, make_state(1)).result(timeout=60)
        copy = ckpt._transport._copier.copy
        restarted = []

        def cut(flat, segment, **rest):
            copy(flat, segment, **rest)
            first.stop()
            restarted.append(FakeDaemon(tmp_path, first.memory))
            until(lambda: ckpt._session.is_open and "Session" in restarted[0].calls)

        monkeypatch.setattr(ckpt._transport._copier, "copy", cut)
        handle = ckpt.save(2, make_state(2))
        with pytest.raises(DaemonUnavailableError, match="restarted"):
            handle.result(timeout=60)
        assert not handle.staged
        monkeypatch.undo()
        assert ckpt.save(3, make_state(3)).result(timeout=60).committed
        assert restarted[0].memory.committed() == [1, 3]
        restarted[0].stop()


def test_a_daemon_that_hangs_costs_a_moment_once_and_is_used_again_when_it_wakes(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "_PROBE_S", 0.5)
    monkeypatch.setattr(stream_module, "_GUARD_INTERVAL_S", 0.2)
    monkeypatch.setattr(session_module, "_WAIT_S", 0.2)
    code = "import sys, pathlib, fake_daemon; d = fake_daemon.FakeDaemon(pathlib.Path(sys.argv[1])); input()"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(arguments, env=env, stdin=subprocess.PIPE)
    try:
        with Checkpointer(job="gpt", address=f"unix://{tmp_path}/fastcheckd.sock") as ckpt:
            until(lambda: ckpt.save(0, make_state()).exception(timeout=60) is None)
            assert ckpt.save(1, make_state()).result(timeout=60).committed
            until(lambda: len(ckpt._session._lent.held) == 2)
            process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            for step in (2, 3):  # into the segments that it has; nobody has to answer for that
                handle = ckpt.save(step, make_state())
                assert handle.staged and not handle.done
            assert time.monotonic() - started < 1
            for step in range(4, 80):
                assert isinstance(ckpt.save(step, make_state()).exception(), DaemonUnavailableError)
            assert time.monotonic() - started < 25, "half a second each"
            process.send_signal(signal.SIGCONT)
            until(lambda: ckpt.save(80, make_state()).exception(timeout=60) is None)
    finally:
        process.kill()
        process.wait()


def test_a_save_waits_for_room_as_long_as_the_daemon_lives(daemon, ckpt, monkeypatch):
    monkeypatch.setattr(stream_module, "_GUARD_INTERVAL_S", 0.05)
    monkeypatch.setattr(session_module, "_WAIT_S", 0.05)
    room = threading.Event()
    daemon.before_reserve = lambda: room.wait(20)
    threading.Timer(0.6, room.set).start()
    started = time.monotonic()
    assert ckpt.save(1, make_state()).result(timeout=60).committed
    assert time.monotonic() - started > 0.5


def test_a_data_process_that_moved_is_found_within_the_next_save(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    first = FakeDaemon(places[0])
    with FakeDaemon(places[1], first.memory) as second, FakeDaemon(tmp_path, first.memory) as agent:
        agent.socket = first.socket
        with Checkpointer(job="gpt", address=f"unix://{tmp_path}/fastcheckd.sock") as ckpt:
            assert ckpt.save(1, make_state()).result(timeout=60).committed
            assert "sealed" in first.calls
            agent.socket = second.socket
            first.stop()
            until(lambda: "Session" in second.calls and ckpt._session.is_open)
            assert ckpt.save(2, make_state()).result(timeout=60).committed
            assert "sealed" in second.calls


def test_closing_ends_pending_handles_and_all_threads(tmp_path):
    with FakeDaemon(tmp_path, auto_commit=False) as daemon:
        ckpt = Checkpointer(job="gpt", address=daemon.address)
        handles = [ckpt.save(step, make_state()) for step in range(2)]
        ckpt.close()
        for handle in handles:
            with pytest.raises(ClosedError, match="daemon goes on"):
                handle.result(timeout=60)
        assert not [t for t in threading.enumerate() if t.name.startswith("fastcheck")]


def test_a_program_may_end_without_closing(tmp_path):
    code = (
        "import torch, fastcheck; c = fastcheck.Checkpointer('gpt');"
        "h = c.save(1, {'t': torch.ones(9)}); print(h.staged, h.exception())"
    )
    with FakeDaemon(tmp_path, auto_commit=False) as daemon:
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), FASTCHECK_ADDRESS=daemon.address)
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True None\n", "")


# Turned off.


def test_disabled_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCHECK_DISABLE", "1")
    with FakeDaemon(tmp_path) as daemon, Checkpointer(address=daemon.address) as ckpt:
        handle = ckpt.save(1, {"x": print})
        assert handle.done
        assert not handle.committed
        assert handle.result() is handle
        assert handle.exception() is None
        assert handle.stats["bytes"] == 0
        assert ckpt.load({"x": 1}) is None
        assert ckpt.steps() == []
        assert daemon.calls == []


def test_every_error_is_in_the_tree():
    classes = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(classes) > 15
    assert all(issubclass(e, FastCheckError) for e in classes)
    for code in common_pb2.ErrorCode.values():
        assert isinstance(errors.from_code(code, "x"), FastCheckError)
