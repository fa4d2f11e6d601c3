"""A machine with a real systemd as its first process: a container over this machine's own files.

Those stay as they are: its root is an overlay whose changes lie in memory and are gone with it. It has no network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
BOOT_S = 60.0
#: Under which paths the container has what runs the daemon: those of this machine may lie where it may not look.
PYTHON, PACKAGES, SOURCE = Path("/opt/fc-python"), Path("/opt/fc-packages"), Path("/opt/fc-source")
SCRIPT = f"""#!{PYTHON}/bin/{Path(sys.executable).resolve().name}
import sys
from {{module}} import {{function}}
sys.exit({{function}}())
"""


def why_not() -> str:
    """Why there can be no such machine here; empty when there can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("systemd-nspawn", "nsenter", "mount") if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


class Machine:
    """Boots when entered, and is gone when left.

    Args:
        folder: an empty one of this test.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = folder / "root"
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = contextlib.ExitStack()
        self._init = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._mount(stack)
            self._install()
            self._boot(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _mount(self, stack: contextlib.ExitStack) -> None:
        changes = self._folder / "changes"
        changes.mkdir()
        self._root.mkdir()
        _do("mount", "-t", "tmpfs", "-o", "size=512m", "none", str(changes))
        stack.callback(_do, "umount", "--lazy", str(changes))
        (changes / "upper").mkdir()
        (changes / "work").mkdir()
        where = f"lowerdir=/,upperdir={changes}/upper,workdir={changes}/work"
        _do("mount", "-t", "overlay", "-o", where, "overlay", str(self._root))
        stack.callback(_do, "umount", "--lazy", str(self._root))

    def _install(self) -> None:
        """What the install guide has one do, but for pip: the same packages are bound into place."""
        for name, module, function in (
            ("fastcheckd", "fastcheckd.main", "main"),
            ("fastcheck", "fastcheck.cli", "main"),
        ):
            self.write(
                f"/opt/fastcheck/bin/{name}", SCRIPT.format(module=module, function=function), mode=0o755
            )
        units = ROOT / "deploy/systemd"
        for unit in ("fastcheckd.service", "mnt-fastcheck.mount"):
            self.write(f"/etc/systemd/system/{unit}", (units / unit).read_text())
        self.write("/etc/sysusers.d/fastcheck.conf", (units / "fastcheck.sysusers").read_text())

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file of the machine; before it boots, and after."""
        place = self._root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def _boot(self, stack: contextlib.ExitStack) -> None:
        log = stack.enter_context((self._folder / "console.log").open("wb"))
        self._process = subprocess.Popen(
            [
                "systemd-nspawn", "--directory", str(self._root), "--register=no", "--keep-unit",
                "--private-network", "--console=pipe", f"--machine=fc-{os.getpid()}",
                f"--bind-ro={sys.base_prefix}:{PYTHON}",
                f"--bind-ro={sysconfig.get_path('purelib')}:{PACKAGES}",
                f"--bind-ro={ROOT}:{SOURCE}",
                "--boot", "systemd.unit=basic.target",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        stack.callback(self._power_off)
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            children = psutil.Process(self._process.pid).children()
            if children:
                self._init = children[0].pid
                state = self.run("systemctl", "is-system-running", check=False)
                if state.stdout.strip() in {"running", "degraded"}:
                    return
            time.sleep(0.2)  # between two looks
        raise RuntimeError(f"no systemd came up: {(self._folder / 'console.log').read_text()[-2000:]}")

    def _power_off(self) -> None:
        assert self._process is not None
        processes = psutil.Process(self._process.pid).children(recursive=True) if self._init else []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # to nspawn: power off
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """A command as root inside."""
        inside = ["nsenter", "--target", str(self._init), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C"}
        return subprocess.run(
            [*inside, *command], check=check, capture_output=True, text=True, timeout=timeout_s,
            env=environment, cwd="/",
        )  # fmt: skip

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", unit, "--property", name, "--value").stdout.strip()


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
