"""What systemd is told: that the node serves, how it is, that it goes on, that it stops. See sd_notify(3).

Datagrams that must never block: one that nobody takes at the moment is dropped, since the next one comes anyway. Sent
by the parent only, never from a signal handler. Without `NOTIFY_SOCKET` there is nobody to tell.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence

logger = logging.getLogger(__name__)

#: How often systemd hears how the node is where it asks for no signs of life.
STATUS_INTERVAL_S = 5.0
_STATUS_CHARS_MAX = 200


class Notifier:
    """Takes what systemd has set out of the environment, so that no child of ours speaks for the service.

    Raises:
        ValueError: WATCHDOG_USEC is no number.
    """

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        where = environment.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + where[1:] if where.startswith("@") else where
        meant_for = environment.pop("WATCHDOG_PID", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        for_us = not meant_for or int(meant_for) == os.getpid()
        #: Longest time between two signs of life that systemd bears; 0: it asks for none.
        self.watchdog_s = int(microseconds) / 1e6 if microseconds and for_us else 0.0
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @property
    def heard(self) -> bool:
        """Whether there is somebody to tell."""
        return self._socket is not None

    def tell(self, **said: str) -> None:
        """Assignments such as `READY="1"`."""
        if self._socket is None:
            return
        text = "\n".join(f"{name}={value}" for name, value in said.items())
        try:
            self._socket.sendto(text.encode(), socket.MSG_DONTWAIT, self._address)
        except OSError as error:  # nobody listens now, or its queue is full
            logger.debug("systemd did not take %r: %s", text, error)

    def close(self) -> None:
        """Tell nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class RelayedNotifier:
    """What the agent tells systemd, which listens to the service's main process alone: the parent passes it on.

    Args:
        direct: the parent's own.
        relay: takes what is to be passed on.
    """

    def __init__(self, direct: Notifier, relay: Callable[[Mapping[str, str]], None]) -> None:
        self.heard = direct.heard
        self.watchdog_s = direct.watchdog_s
        self._relay = relay

    def tell(self, **said: str) -> None:
        """Assignments such as `READY="1"`."""
        if self.heard:
            self._relay(said)


async def report(
    notifier: Notifier | RelayedNotifier,
    ready: asyncio.Event,
    status: Callable[[], str],
    stuck: Callable[[], Sequence[str]],
) -> None:
    """Tell systemd how the node is until cancelled.

    Args:
        ready: the node serves. Whether it found a registry does not matter: it may be the one that others wait for.
        status: one line for people.
        stuck: what of the node has made no progress for so long that only a new start may help; while there is
            any, the watchdog is not fed.
    """
    if not notifier.heard:
        return
    interval_s = min(STATUS_INTERVAL_S, notifier.watchdog_s / 3 or STATUS_INTERVAL_S)
    complained = False
    while True:
        said: Mapping[str, str] = {"STATUS": one_line(status())}
        if ready.is_set():
            said = {"READY": "1", **said}
        if not (parts := stuck()):
            said = {**said, "WATCHDOG": "1"}
            complained = False
        elif not complained:
            logger.error("no progress of %s: the watchdog gets no sign of life any more", ", ".join(parts))
            complained = True
        notifier.tell(**said)
        if ready.is_set():
            await asyncio.sleep(interval_s)
            continue
        try:
            async with asyncio.timeout(interval_s):
                await ready.wait()
        except TimeoutError:
            continue


def one_line(text: str) -> str:
    """As much of a text as fits into a status line."""
    return " ".join(text.split())[:_STATUS_CHARS_MAX]
