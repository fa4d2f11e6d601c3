"""The processes that tests fork are processes: what they say, how they end, and what they are told."""

import os
import signal
import subprocess

import pytest
from tests.forks import Fork, call, run

MODULES = ("json",)


def ends_with(code):
    raise SystemExit(code)


def test_a_program_has_its_streams_arguments_and_environment(tmp_path):
    code = "import os, sys; print(os.getpid(), sys.argv[1:], os.environ['X'], os.getcwd(), sys.stdin.read())"
    environment = {**os.environ, "X": "y"}
    with Fork(
        ["-c", code, "a", 1],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preload=MODULES,
    ) as fork:
        fork.stdin.write("told")
        fork.stdin.close()
        assert fork.stdout.read() == f"{fork.pid} ['a', '1'] y {tmp_path} told\n"
        assert fork.wait(30) == 0


def test_it_ends_as_python_would():
    (failed, said) = (run(["-c", code], preload=MODULES) for code in ("1 / 0", "import sys; sys.exit('no')"))
    assert failed.returncode == 1 and "ZeroDivisionError" in failed.stderr
    assert (said.returncode, said.stderr) == (1, "no\n")
    assert call(ends_with, 7, preload=MODULES).wait(30) == 7


def test_it_is_stopped_and_killed_by_its_pid():
    with Fork(["-c", "import time; time.sleep(60)"], preload=MODULES) as fork:
        assert fork.poll() is None
        os.kill(fork.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.05)
        fork.kill()
        assert fork.wait(30) == -signal.SIGKILL == fork.returncode
        fork.kill()  # harmless


def test_modules_and_scripts_run_as_the_main_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import beside\nprint(__name__, beside.X)\n")
    (tmp_path / "beside.py").write_text("X = 3\n")
    assert run([script], preload=MODULES).stdout == "__main__ 3\n"
    assert run(["-m", "json.tool", "--help"], preload=MODULES).stdout.startswith("usage:")
