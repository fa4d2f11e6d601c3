import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from fastcheckd import supervise
from fastcheckd.supervise import EXIT_CONFIG, Child


async def until(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not (result := condition()):
            await asyncio.sleep(0.01)
        return result


def child(code: str, fatal: list[Exception]) -> Child:
    return Child("test", [sys.executable, "-c", textwrap.dedent(code)], dict(os.environ), fatal.append)


def test_a_killed_child_is_started_again():
    async def story():
        supervised = child("import time; time.sleep(60)", [])
        supervised.start()
        first = await until(lambda: supervised.pid)
        os.kill(first, signal.SIGKILL)
        second = await until(lambda: supervised.pid if supervised.pid not in {None, first} else None)
        assert supervised.restarts == 1
        await supervised.stop(grace_s=5)
        assert not psutil.pid_exists(second)

    asyncio.run(story())


def test_a_child_that_ignores_sigterm_is_killed():
    async def story():
        supervised = child(
            """
            import signal, sys, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
            """,
            [],
        )
        supervised.start()
        pid = await until(lambda: supervised.pid)
        await until(lambda: signal.SIGTERM in ignored_signals(pid))
        await supervised.stop(grace_s=0.2)
        assert not psutil.pid_exists(pid)

    asyncio.run(story())


def ignored_signals(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_a_child_that_cannot_work_is_not_started_again_and_again():
    async def story():
        fatal: list[Exception] = []
        supervised = child(f"raise SystemExit({EXIT_CONFIG})", fatal)
        supervised.start()
        await until(lambda: fatal)
        assert supervised.restarts == 0
        await supervised.stop(grace_s=1)

    asyncio.run(story())


def test_a_child_dies_with_its_parent():
    parent = """
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", '''
        import os, time
        from fastcheckd.supervise import die_with_parent
        die_with_parent(int(os.environ["PARENT"]))
        print("ready", flush=True)
        time.sleep(60)
        '''.replace("\\n        ", "\\n")], env={**os.environ, "PARENT": str(os.getpid())})
        print(child.pid, flush=True)
        child.wait()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        lines = sorted((process.stdout.readline().strip(), process.stdout.readline().strip()))
        assert lines[1] == "ready"
        grandchild = psutil.Process(int(lines[0]))
        process.kill()
        assert grandchild.wait(timeout=60) is None or not grandchild.is_running()


def test_signs_of_life_are_counted_and_a_child_that_is_stopped_gives_none():
    async def story():
        supervised = child(
            """
            import time
            from fastcheckd.beats import BeatGiver
            giver = BeatGiver()
            while True:
                giver.give()
                time.sleep(0.01)
            """,
            [],
        )
        supervised.start()
        pid = await until(lambda: supervised.beats > 3 and supervised.pid)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        await asyncio.sleep(0.1)  # what was in the pipe is taken
        seen = supervised.beats
        await asyncio.sleep(0.1)
        assert supervised.beats == seen
        supervised.kill()
        await until(lambda: supervised.beats > seen)  # the next life's
        await supervised.stop(grace_s=5)

    asyncio.run(story())


def test_a_child_that_keeps_ending_is_in_trouble_until_it_has_lived_a_while(monkeypatch, tmp_path):
    monkeypatch.setattr(supervise, "HEALTHY_AFTER_S", 0.3)
    mended = tmp_path / "mended"

    async def story():
        supervised = child(
            f"""
            import pathlib, time
            if not pathlib.Path({str(mended)!r}).exists():
                raise SystemExit(5)
            time.sleep(60)
            """,
            [],
        )
        supervised.start()
        said = await until(lambda: supervised.trouble)
        assert said.startswith("keeps ending (3 times in a row, lastly with 5)")
        mended.touch()
        await until(lambda: not supervised.trouble)
        assert supervised.pid and supervised.restarts >= 3
        await supervised.stop(grace_s=5)

    asyncio.run(story())


def test_the_end_of_a_child_is_noticed_where_no_descriptor_is_left_for_it(monkeypatch):
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)

    async def story():
        supervised = child("import time; time.sleep(60)", [])
        supervised.start()
        first = await until(lambda: supervised.pid)
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervised.pid not in {None, first})
        await supervised.stop(grace_s=5)

    asyncio.run(story())
