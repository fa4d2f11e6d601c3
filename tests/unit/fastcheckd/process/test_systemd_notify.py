import asyncio
import os
import socket

import pytest

from fastcheckd.process.systemd import Notifier, one_line, report


@pytest.fixture
def systemd(tmp_path):
    """Stands where systemd listens; `.env` is what it sets."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path = str(tmp_path / "notify")
    listener.bind(path)
    listener.settimeout(5)
    yield listener, path
    listener.close()


def heard(listener: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in listener.recv(4096).decode().splitlines())


def test_what_is_set_is_taken_so_that_no_child_speaks_for_the_service(systemd):
    listener, path = systemd
    environment = {
        "NOTIFY_SOCKET": path,
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "b",
    }
    notifier = Notifier(environment)
    assert environment == {"A": "b"}
    assert notifier.watchdog_s == 3.0
    notifier.tell(READY="1", STATUS="well")
    assert heard(listener) == {"READY": "1", "STATUS": "well"}
    notifier.close()
    assert not notifier.heard


def test_an_abstract_socket_and_a_watchdog_of_another_process():
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"fastcheck-test-{os.getpid()}"
    listener.bind("\0" + name)
    listener.settimeout(5)
    notifier = Notifier({"NOTIFY_SOCKET": "@" + name, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"})
    assert notifier.watchdog_s == 0
    notifier.tell(STOPPING="1")
    assert heard(listener) == {"STOPPING": "1"}
    listener.close()
    notifier.close()


def test_nobody_to_tell_and_a_listener_that_does_not_read_never_block(systemd):
    _, path = systemd
    Notifier({}).tell(READY="1")
    notifier = Notifier({"NOTIFY_SOCKET": path})
    for _ in range(10_000):  # far more than the queue takes
        notifier.tell(STATUS="x" * 100)
    notifier.close()
    gone = Notifier({"NOTIFY_SOCKET": path + "-gone"})
    gone.tell(READY="1")
    gone.close()


def test_ready_when_it_is_and_no_sign_of_life_while_a_part_is_stuck(systemd):
    listener, path = systemd
    stuck: list[str] = []

    async def story():
        notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "60000"})  # every 20 ms
        ready = asyncio.Event()
        task = asyncio.create_task(report(notifier, ready, lambda: "all\nwell", lambda: stuck))
        first = await asyncio.to_thread(heard, listener)
        assert first == {"STATUS": "all well", "WATCHDOG": "1"}
        ready.set()
        async with asyncio.timeout(5):
            while "READY" not in await asyncio.to_thread(heard, listener):
                pass
        stuck.append("data")
        async with asyncio.timeout(5):
            while "WATCHDOG" in await asyncio.to_thread(heard, listener):
                pass
        for _ in range(5):
            assert "WATCHDOG" not in await asyncio.to_thread(heard, listener)
        stuck.clear()
        async with asyncio.timeout(5):
            while "WATCHDOG" not in await asyncio.to_thread(heard, listener):
                pass
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        notifier.close()

    asyncio.run(story())


def test_a_status_is_one_bounded_line():
    assert one_line("a\n b\t c" + "x" * 1000).startswith("a b cx") and len(one_line("x" * 1000)) == 200
