"""The remote storage of the paper's experiment: an FTP server of a package, in a namespace of its own, files in RAM.

Why FTP: of what installs from PyPI and fsspec, and so torch.distributed.checkpoint, can write to, it is the one that
carries 2.5 Gbit/s on one core (pyftpdlib hands files to the kernel's sendfile). moto's S3 server spends ten times the
CPU per byte and was slower than the slowest link; WebDAV's client writes everything to a file before it sends it.
`ceiling` says what the server does with nothing around it.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import time
from pathlib import Path

from tests.netlab.wires import ROOT, Network

PORT = 2121
USER = "fastcheck"
START_TIMEOUT_S = 20.0
CEILING_TIMEOUT_S = 120.0

#: In the client's namespace: plain uploads and downloads of one file, from and to memory.
_CEILING = """
import ftplib, io, json, sys, time
host, port, user, password, size, rounds = sys.argv[1:]
size = int(size)
payload = bytes(size)
runs = {"up": [], "down": []}
for _ in range(int(rounds)):
    with ftplib.FTP(timeout=60) as link:
        link.connect(host, int(port))
        link.login(user, password)
        started = time.perf_counter()
        link.storbinary("STOR ceiling", io.BytesIO(payload), blocksize=1 << 20)
        runs["up"].append(size / (time.perf_counter() - started))
        parts = []
        started = time.perf_counter()
        link.retrbinary("RETR ceiling", parts.append, blocksize=1 << 20)
        runs["down"].append(size / (time.perf_counter() - started))
        assert sum(map(len, parts)) == size
        link.delete("ceiling")
print(json.dumps(runs))
"""


def why_not(python: Path) -> str:
    """Why there is no server; empty when there is one. `python`: of the virtual environment that has it."""
    if not python.exists():
        return f"{python} does not exist; make it with: make bench-paper-server"
    done = subprocess.run([python, "-c", "import pyftpdlib"], capture_output=True, text=True, check=False)
    return (
        f"{python} has no pyftpdlib; install tests/benchmarks/paper-requirements.txt"
        if done.returncode
        else ""
    )


class Storage:
    """The server, on the machine `name` of the network. A context manager: its process and files are gone afterwards.

    Args:
        folder: for its files; in RAM, so that no disk is measured.
    """

    def __init__(self, network: Network, name: str, python: Path, folder: Path) -> None:
        self._network, self._name, self._python, self._folder = network, name, python, folder
        self._password = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Storage:
        self._folder.mkdir(mode=0o700)
        address = self._network.address(self._name)
        listen = ["-i", address, "-p", str(PORT), "-w", "-d", str(self._folder)]
        command = [str(self._python), "-m", "pyftpdlib", *listen, "-u", USER, "-P", self._password]
        with self._folder.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                self._network.command(self._name, *command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.with_suffix(".log").unlink(missing_ok=True)

    def url(self, checkpoint: str) -> str:
        """Of a checkpoint, for fsspec."""
        return f"ftp://{USER}:{self._password}@{self._network.address(self._name)}:{PORT}/{checkpoint}"

    def prepare(self, checkpoint: str) -> None:
        """Make a new checkpoint's folder: ranks that all want to make it at once get in each other's way."""
        (self._folder / checkpoint).mkdir(exist_ok=True)

    def remove(self, checkpoint: str) -> None:
        """Delete a checkpoint, behind the server's back."""
        shutil.rmtree(self._folder / checkpoint, ignore_errors=True)

    def ceiling(self, client: str, size_bytes: int, rounds: int) -> dict[str, list[float]]:
        """Bytes per second `up` and `down` between the server and a machine, without checkpoints."""
        where = [self._network.address(self._name), str(PORT), USER, self._password]
        command = self._network.command(
            client, str(self._python), "-c", _CEILING, *where, str(size_bytes), str(rounds)
        )
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CEILING_TIMEOUT_S, check=False, cwd=ROOT
        )
        if done.returncode:
            raise RuntimeError(f"the storage server's ceiling was not measured: {done.stderr.strip()}")
        found: dict[str, list[float]] = json.loads(done.stdout)
        return found

    def _wait(self) -> None:
        """Until it listens.

        Raises:
            RuntimeError: it does not, in time; with what it said.
        """
        address = self._network.address(self._name)
        probe = f"import socket; socket.create_connection(({address!r}, {PORT}), 2).close()"
        deadline = time.monotonic() + START_TIMEOUT_S
        assert self._process is not None
        while True:
            command = self._network.command(self._name, str(self._python), "-c", probe)
            if not subprocess.run(command, capture_output=True, check=False).returncode:
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                said = self._folder.with_suffix(".log").read_text()
                raise RuntimeError(f"the storage server did not start: {said}")
            time.sleep(0.1)
