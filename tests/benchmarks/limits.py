"""The limits that figures are compared with: one memory copy, and framed TCP that does nothing else.

`python -m tests.benchmarks.limits PORT_FILE BYTES STREAMS DIGESTS` is the receiving end of the latter, a process of its
own as a peer's daemon is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import xxhash

FRAME_BYTES = 4 << 20
HEADER = b"\0" * 64


class Memcpy:
    """A one-thread copy of so many bytes from warm memory to warm memory."""

    def __init__(self, size_bytes: int) -> None:
        self._source = torch.ones(size_bytes, dtype=torch.uint8)
        self._target = torch.zeros(size_bytes, dtype=torch.uint8)
        self.run()

    def run(self) -> float:
        """Seconds of one copy."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        started = time.perf_counter()
        self._target.copy_(self._source)
        seconds = time.perf_counter() - started
        torch.set_num_threads(threads)
        return seconds


class FreshCopy:
    """The same copy into shared memory that was never touched: what whoever copies there for the first time pays."""

    def __init__(self, size_bytes: int) -> None:
        self._source = torch.ones(size_bytes, dtype=torch.uint8)

    def run(self) -> float:
        """Seconds of one copy."""
        with mmap.mmap(-1, self._source.numel()) as memory:
            target = torch.frombuffer(memory, dtype=torch.uint8)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            started = time.perf_counter()
            target.copy_(self._source)
            seconds = time.perf_counter() - started
            torch.set_num_threads(threads)
            del target
            return seconds


class FramedTcp:
    """Framed TCP over loopback between two processes, from and to warm shared memory.

    With `digests` each end hashes every frame as the lane does: before it goes, and when it is there.
    """

    def __init__(self, size_bytes: int, streams: int, *, digests: bool = False) -> None:
        self._size_bytes = size_bytes
        self._streams = streams
        self._digests = digests
        self._memory = mmap.mmap(-1, size_bytes)
        for position in range(0, size_bytes, mmap.PAGESIZE):
            self._memory[position] = 1
        self._source = memoryview(self._memory)
        folder = Path(tempfile.mkdtemp(prefix="fastcheck-bench-"))
        port_file = folder / "port"
        arguments = [str(port_file), str(size_bytes), str(streams), "digests" if digests else ""]
        command = [sys.executable, "-m", "tests.benchmarks.limits", *arguments]
        # It ends when its standard input does, so with us, however we end.
        self._receiver = subprocess.Popen(command, stdin=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while not port_file.exists():
            if time.monotonic() > deadline or self._receiver.poll() is not None:
                raise RuntimeError("the receiving end of the TCP limit did not start")
            time.sleep(0.01)
        self._port = int(port_file.read_text())
        port_file.unlink()
        folder.rmdir()
        self.run()

    def run(self) -> float:
        """Seconds from connecting until the receiver has said that all is there."""
        started = time.perf_counter()
        threads = [threading.Thread(target=self._send, args=(i,)) for i in range(self._streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started

    def cpu_s(self) -> float:
        """Seconds of CPU, user and system, that both ends take for one run."""
        receiver = psutil.Process(self._receiver.pid)

        def used() -> float:
            return time.process_time() + sum(receiver.cpu_times()[:2])

        before = used()
        self.run()
        return used() - before

    def _send(self, stream: int) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(bytes([stream]))
            for low, high in frames(self._size_bytes, stream, self._streams):
                if self._digests:
                    xxhash.xxh3_128_digest(self._source[low:high])
                views = [memoryview(HEADER), self._source[low:high]]
                while views:
                    sent = connection.sendmsg(views)
                    while views and sent >= len(views[0]):
                        sent -= len(views.pop(0))
                    if sent:
                        views[0] = views[0][sent:]
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    def close(self) -> None:
        """End the receiving process."""
        assert self._receiver.stdin is not None
        self._receiver.stdin.close()
        self._receiver.wait()


def frames(size_bytes: int, stream: int, streams: int) -> Iterator[tuple[int, int]]:
    """The byte ranges that travel on one of several streams."""
    for low in range(stream * FRAME_BYTES, size_bytes, streams * FRAME_BYTES):
        yield low, min(low + FRAME_BYTES, size_bytes)


def _receive(connection: socket.socket, target: memoryview, streams: int, digests: bool) -> None:
    header = bytearray(len(HEADER))
    with connection:
        stream = connection.recv(1)[0]
        for low, high in frames(len(target), stream, streams):
            for view in (memoryview(header), target[low:high]):
                position = 0
                while position < len(view):
                    received = connection.recv_into(view[position:])
                    if not received:
                        return
                    position += received
            if digests:
                xxhash.xxh3_128_digest(target[low:high])
        connection.sendall(b"1")


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def serve(port_file: Path, size_bytes: int, streams: int, digests: bool) -> None:
    """Receive until standard input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    memory = mmap.mmap(-1, size_bytes)
    for position in range(0, size_bytes, mmap.PAGESIZE):
        memory[position] = 1
    target = memoryview(memory)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        temporary = port_file.with_suffix(".tmp")
        temporary.write_text(str(listener.getsockname()[1]))
        temporary.replace(port_file)
        while True:
            connection, _ = listener.accept()
            threading.Thread(
                target=_receive, args=(connection, target, streams, digests), daemon=True
            ).start()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "digests")
