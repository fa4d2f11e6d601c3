"""Python programs as processes of their own, forked from one that has imported what takes them long.

Half of what a trainer of a test costs is `import torch`, two seconds of a core and more with a framework's modules. A
process that is forked here has them at once. Otherwise it is like `python -m MODULE` or `python SCRIPT`: it has a pid
and memory of its own, its standard streams are where the caller wants them, and it may be stopped and killed.

There is one parent for each set of preloaded modules and path, from its first use until this process ends.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import gc
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

#: What ranks of torch use.
TORCH = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.run",
    "torch._dynamo",
    "fastcheck",
)
#: What examples for frameworks use.
FRAMEWORKS = ("transformers.trainer", "accelerate", "lightning.pytorch", "torchdata.stateful_dataloader")
_ROOT = Path(__file__).parents[1]
_REQUEST_BYTES_MAX = 1 << 17
_PIPE = subprocess.PIPE
_CALL = "call"


class Fork:
    """A process of a parent: the part of `subprocess.Popen` that tests use, with text streams.

    Args:
        arguments: of the interpreter: `-m MODULE`, `-c CODE` or a script, then the program's own.
        env: all of its environment, but for what modules read as they are imported; this process' by default. Its
            PYTHONPATH is that of the parent.
        stdin, stdout, stderr: `subprocess.PIPE`, a file, or None for this process' own.
        preload: modules that its parent has imported.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = _ROOT,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        preload: Sequence[str] = TORCH,
    ) -> None:
        self.args = [str(each) for each in arguments]
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        theirs, ours = [], []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            if wanted == _PIPE:
                read, write = os.pipe()
                mine, its = (write, read) if number == 0 else (read, write)
                setattr(
                    self, ("stdin", "stdout", "stderr")[number], os.fdopen(mine, "w" if number == 0 else "r")
                )
                ours.append(its)
            elif wanted == subprocess.DEVNULL:
                its = os.open(os.devnull, os.O_RDWR)
                ours.append(its)
            else:
                its = number if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno()
            theirs.append(its)
        self._status, reports = os.pipe()
        weakref.finalize(self, os.close, self._status)
        self._lock = threading.Lock()
        request = {"arguments": self.args, "environment": dict(env or os.environ), "cwd": str(cwd)}
        try:
            self.pid = _parent(tuple(preload)).fork(request, [*theirs, reports])
        finally:
            for fd in (*ours, reports):
                os.close(fd)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; raises subprocess.TimeoutExpired."""
        code = self._await(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _await(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._status, select.POLLIN)
            ready = ended.poll(None if timeout is None else timeout * 1e3)
            with self._lock:
                if ready and self.returncode is None:
                    status = os.read(self._status, 16)
                    assert status, f"the parent of {self.args} has ended"
                    self.returncode = os.waitstatus_to_exitcode(int(status))
        return self.returncode


def call(function: Callable[..., None], *arguments: Any, **options: Any) -> Fork:
    """A Fork that calls a function of a module with these arguments."""
    return Fork([_CALL, base64.b64encode(pickle.dumps((function, arguments))).decode()], **options)


def run(
    arguments: Sequence[object], *, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A Fork to its end; exit code, stdout and stderr, which must fit into pipes."""
    with Fork(arguments, stdout=_PIPE, stderr=_PIPE, **options) as fork:
        assert fork.stdout is not None and fork.stderr is not None
        try:
            code = fork.wait(timeout)
        finally:
            fork.kill()
        return subprocess.CompletedProcess(fork.args, code, fork.stdout.read(), fork.stderr.read())


def popen(command: Sequence[object], **options: Any) -> Fork:
    """In place of a module's `subprocess.Popen` of a Python program with text streams: a Fork."""
    executable, *arguments = command
    assert executable == sys.executable
    del (
        options["text"],
        options["start_new_session"],
    )  # streams always are; a Fork gets no signal of a terminal
    return Fork(arguments, **options)


class _Parent:
    """The process that forks, and the line to it."""

    def __init__(self, preload: Sequence[str], path: str) -> None:
        self._line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": path}
        environment.pop("PYTHONUNBUFFERED", None)  # each process has its own mind about that
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(its.fileno()), *preload],
                env=environment,
                cwd=_ROOT,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """The pid of a new process with these streams; the last is told its status when it has ended."""
        message = json.dumps(request).encode()
        assert len(message) < _REQUEST_BYTES_MAX
        socket.send_fds(self._line, [message], fds)
        answer = self._line.recv(16)
        assert answer, "the process that forks has ended; its message is above"
        return int(answer)

    def close(self) -> None:
        """End it; what it has forked lives on."""
        self._line.close()
        self._process.wait()


_parents: dict[tuple[int, tuple[str, ...], str], _Parent] = {}


def _parent(preload: tuple[str, ...]) -> _Parent:
    path = os.pathsep.join(each for each in sys.path if each)
    key = os.getpid(), preload, path
    if key not in _parents:
        _parents[key] = _Parent(preload, path)
    return _parents[key]


@atexit.register
def _close_all() -> None:
    for (pid, *_), parent in _parents.items():
        if pid == os.getpid():
            parent.close()


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns it in the process that is to fulfil it, and None at the end of all requests."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reports: dict[int, int] = {}
    waiting = select.poll()  # select() takes no descriptor above 1023
    waiting.register(line, select.POLLIN)
    waiting.register(woken, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waiting.poll()}
        if woken in ready:
            os.read(woken, 4096)
            while reports:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                report = reports.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                    os.write(report, str(status).encode())
                os.close(report)
        if line.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(line, _REQUEST_BYTES_MAX, 4)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for target, fd in enumerate(fds[:3]):
                    os.dup2(fd, target)
                for fd in (*fds, woken, wakes, line.detach(), *reports.values()):
                    os.close(fd)
                request: dict[str, Any] = json.loads(message)
                return request
            for fd in fds[:3]:
                os.close(fd)
            reports[pid] = fds[3]
            line.send(str(pid).encode())


def _become(request: dict[str, Any]) -> NoReturn:
    """Run the program of a request as Python would, and end."""
    code = 0
    try:
        _run(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201  as Python does
    except BaseException:  # noqa: BLE001  as Python does, too
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as multiprocessing's children do
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking down an interpreter goes through all objects of all modules, which are shared with the parent until then.
    os._exit(code)


def _run(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # TMPDIR may be another
    os.chdir(request["cwd"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  as long as the process lives
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    arguments: list[str] = request["arguments"]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == _CALL:
        function, given = pickle.loads(base64.b64decode(arguments[1]))
        function(*given)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], sys.modules["__main__"].__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """Be a parent: `python -m tests.forks FD MODULE...`, or a process that it has forked."""
    with socket.socket(fileno=int(sys.argv[1])) as line:
        for name in sys.argv[2:]:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        request = _serve(line)
    if request is not None:
        _become(request)


if __name__ == "__main__":
    main()
