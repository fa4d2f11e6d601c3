"""Another user of the machine plays the daemon: nothing is said to it. Needs root, to be several users."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forks import run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")

MALLORY, USER, SERVICE = 60001, 60002, 60003
TRAINER = """
import os, sys
import torch
from fastcheck import Checkpointer
from fastcheck.errors import DaemonUnavailableError
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
try:
    with Checkpointer("job", rank=0, world_size=1, timeout_s=0.5) as ckpt:
        ckpt.load({"x": torch.zeros(1)})
except DaemonUnavailableError as error:
    print(error)
"""


class Listener:
    """Somebody who listens at a path, and notes whether anything was said."""

    def __init__(self, path: Path, uid: int) -> None:
        code = (
            "import os, socket, sys\n"
            f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
            "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); s.listen()\n"
            "print('ready', flush=True)\n"
            "while True:\n"
            "    c, _ = s.accept(); c.settimeout(5)\n"
            "    try: print('heard', len(c.recv(100)), flush=True)\n"
            "    except OSError: print('heard 0', flush=True)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def end(self) -> int:
        """How many connections something was said on."""
        self._process.kill()
        said, _ = self._process.communicate()
        return sum(line != "heard 0" for line in said.splitlines())


def trainer(uid: int, home: Path, address: str = "") -> str:
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    if address:
        environment["FASTCHECK_ADDRESS"] = address
    done = run(["-c", TRAINER, uid], env=environment, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def shared(tmp_path_factory):
    """A folder in which everybody may make files, as the machine's temporary folder is."""
    folder = Path(tmp_path_factory.mktemp("shared"))
    for parent in [folder, *folder.parents]:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    folder.chmod(0o1777)
    return folder


def made(folder: Path, uid: int, mode: int) -> Path:
    folder.mkdir()
    os.chown(folder, uid, uid)
    folder.chmod(mode)
    return folder


def test_a_daemon_that_another_user_plays_before_there_is_one_hears_nothing(shared):
    listener = Listener(made(shared / f"fastcheck-{USER}", MALLORY, 0o755) / "fastcheckd.sock", MALLORY)
    told = trainer(USER, shared)
    assert listener.end() == 0
    assert f"user {MALLORY} answers at" in told and "FASTCHECK_ADDRESS" in told


def test_nor_in_a_folder_of_ours_that_others_may_write_to(shared):
    listener = Listener(made(shared / f"fastcheck-{USER}", USER, 0o777) / "fastcheckd.sock", MALLORY)
    told = trainer(USER, shared)
    assert listener.end() == 0 and f"user {MALLORY} answers at" in told


@pytest.mark.parametrize("uid", [USER, 0])
def test_ones_own_daemon_and_roots_are_spoken_to(shared, uid):
    listener = Listener(made(shared / f"fastcheck-{USER}", uid, 0o755) / "fastcheckd.sock", uid)
    told = trainer(USER, shared)
    assert listener.end() > 0 and "answers at" not in told


def test_a_service_is_spoken_to_where_somebody_named_its_folder(shared):
    path = made(shared / "service", SERVICE, 0o755) / "fastcheckd.sock"
    listener = Listener(path, SERVICE)
    told = trainer(USER, shared, f"unix://{path}")
    assert listener.end() > 0 and "answers at" not in told


def test_a_socket_that_is_not_there_is_for_connecting_to_find(shared):
    assert "cannot be reached" in trainer(USER, shared)
    with socket.socket(socket.AF_UNIX) as sock:  # bound, and nobody listens
        folder = made(shared / f"fastcheck-{USER}", USER, 0o755)
        sock.bind(str(folder / "fastcheckd.sock"))
        assert "cannot be reached" in trainer(USER, shared)
