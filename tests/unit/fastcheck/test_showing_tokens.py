"""What the SDK shows of itself in its calls: a token from a file, read anew each time, never over plaintext."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from fake_daemon import FakeDaemon

from fastcheck import Checkpointer, DaemonUnavailableError, DeniedError, InvalidArgumentError, SaveFailedError
from fastcheck.admin import AdminClient
from fastcheck.security import VARIABLES
from fastcheck.tokens import FILE_VARIABLE, shown_to
from fastcheck_proto.conventions import TOKEN_BYTES_MAX
from fastcheck_proto.v1 import common_pb2

STATE = {"weights": torch.arange(1000.0)}


class Listening(FakeDaemon):
    """Notes what each call shows."""

    def __init__(self, folder: Path) -> None:
        self.shown: list[tuple[str, str]] = []
        super().__init__(folder)

    def _enter(self, name: str, context: grpc.ServicerContext, *, allowed: bool = False) -> None:
        for key, value in context.invocation_metadata():
            if key == "authorization":
                self.shown.append((name, value))
        super()._enter(name, context, allowed=allowed)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Listening]:
    with Listening(tmp_path) as made:
        yield made


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text("one.one.one\n")
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    return path


def checkpointer(daemon: FakeDaemon) -> Checkpointer:
    return Checkpointer(job="j", rank=0, world_size=1, address=daemon.address)


def test_every_call_shows_what_is_in_the_file_then(daemon: Listening, token_file: Path) -> None:
    with checkpointer(daemon) as ckpt:
        ckpt.save(1, STATE).result(timeout=30)
        first = dict(daemon.shown)
        assert set(first) >= {"Session"}
        assert set(first.values()) == {"Bearer one.one.one"}
        daemon.shown.clear()
        token_file.write_text("two.two.two")
        assert ckpt.load({"weights": torch.zeros(1000)}) == 1
        assert ckpt.steps() == [1]
        assert {"Load", "ListSteps"} <= {name for name, _ in daemon.shown}
    assert {value for _, value in daemon.shown} == {"Bearer two.two.two"}
    # The front door says where the trainer's is, to whoever may open it.
    assert "Describe" in daemon.calls and "Describe" not in dict(daemon.shown)


def test_without_the_variable_nothing_is_shown(daemon: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, "")
    with checkpointer(daemon) as ckpt:
        ckpt.save(1, STATE).result(timeout=30)
    assert not daemon.shown


def test_an_operator_shows_none(daemon: Listening, token_file: Path) -> None:
    with AdminClient(daemon.address) as client, pytest.raises(DaemonUnavailableError, match="something else"):
        client.status()
    assert not daemon.shown


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "three parts"),
        (b"a.b", "three parts"),
        (b"a.b.c\nd.e.f", "three parts"),
        (b"a.b.c\r\nx: y", "three parts"),
        (b"a.b." + b"x" * TOKEN_BYTES_MAX, "at most"),
        ("a.b.\u00fc".encode(), "ASCII"),
        (None, "No such file"),
    ],
)
def test_a_file_without_a_token_is_said_and_never_in_the_training_loop(
    daemon: Listening, token_file: Path, content: bytes | None, says: str
) -> None:
    token_file.unlink() if content is None else token_file.write_bytes(content)
    with checkpointer(daemon) as ckpt:
        handle = ckpt.save(1, STATE)  # does not raise
        with pytest.raises(SaveFailedError, match=says) as failed:
            handle.result(timeout=30)
        assert str(token_file) in str(failed.value)
        with pytest.raises(InvalidArgumentError, match=says):
            ckpt.steps()
    assert not daemon.shown and (not content or content.decode() not in str(failed.value))


def test_a_file_that_goes_between_two_calls_fails_the_later(daemon: Listening, token_file: Path) -> None:
    with checkpointer(daemon) as ckpt:
        ckpt.save(1, STATE).result(timeout=30)
        token_file.unlink()
        with pytest.raises(InvalidArgumentError, match=FILE_VARIABLE):
            ckpt.load({"weights": torch.zeros(1000)})
        # The session's stream showed its token when it was opened; the next one shows another.
        ckpt.save(2, STATE).result(timeout=30)
        ckpt._session._keeper.stream.cut()
        with pytest.raises(SaveFailedError, match=FILE_VARIABLE):
            while True:  # the stream may be cut while a state is copied: that one fails for another reason
                with contextlib.suppress(DaemonUnavailableError):
                    ckpt.save(3, STATE).result(timeout=30)
        token_file.write_text("a.b.c")
        ckpt.save(4, STATE).result(timeout=30)


def test_a_token_never_goes_over_plaintext(
    daemon: Listening, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Checkpointer(job="j", rank=0, world_size=1, address=daemon.tcp_address) as ckpt,
        pytest.raises(InvalidArgumentError, match=VARIABLES[0]),
    ):
        ckpt.steps()
    assert not daemon.shown
    environment = {FILE_VARIABLE: str(token_file), **dict.fromkeys(VARIABLES, "file")}
    assert shown_to("10.0.0.1:7451", environment) is not None
    assert shown_to("10.0.0.1:7451", {}) is None


def test_a_refusal_reaches_who_asked(daemon: Listening, token_file: Path) -> None:
    daemon.refuse["Session"] = (common_pb2.ERROR_CODE_DENIED, "this token does not pass: it has expired")
    with checkpointer(daemon) as ckpt:
        with pytest.raises(DeniedError, match="expired"):
            ckpt.save(1, STATE).result(timeout=30)
        del daemon.refuse["Session"]
        ckpt.save(2, STATE).result(timeout=30)
