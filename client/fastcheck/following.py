"""The thread behind a handle: reports what the daemon says of a sealed save, through daemon restarts.

A restarted daemon adopts what it held, so a broken watch says nothing about the save: it is attached
again until the daemon has been away for too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from fastcheck_proto.v1 import trainer_pb2 as pb

from .daemon import Daemon
from .errors import ClosedError, DaemonUnavailableError, FastCheckError
from .handle import SaveHandle, as_save_error

#: A daemon that is away for longer than this does not come back in time to matter.
_AWAY_S_MAX = 30.0
_REATTACH_INTERVAL_S = 0.5
#: A watch that held this long was a good one, even if it said nothing. No attempt to reach a daemon that is away takes
#: so long, also where cores are busy: it would count as a watch, and the handle would never end.
_HELD_S = 15.0


class Follower:
    """Follows one save in a thread of its own.

    `ended` is called with the handle when it is done, `offered` with the segments that later saves will get.
    """

    def __init__(
        self,
        handle: SaveHandle,
        daemon: Daemon,
        request: pb.WatchSaveRequest,
        closing: threading.Event,
        ended: Callable[[SaveHandle], None],
        offered: Callable[[Sequence[pb.SegmentRef]], None],
    ) -> None:
        self._handle = handle
        self._daemon = daemon
        self._request = request
        self._closing = closing
        self._ended = ended
        self._offered = offered
        self.thread = threading.Thread(target=self._run, name=f"fastcheck-step-{handle.step}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001  a handle must end, whatever happens here
            self._handle._finish(FastCheckError(f"defect in FastCheck while following a save: {error!r}"))
        finally:
            self._ended(self._handle)

    def _follow(self) -> None:
        lost_at: float | None = None
        while not self._closing.is_set():
            began = time.monotonic()
            problem: FastCheckError = DaemonUnavailableError("the daemon ended the watch without a verdict")
            try:
                for update in self._daemon.watch_save(self._request):
                    lost_at = None
                    self._handle._absorb(update)
                    self._offered(update.spares)
                    if self._handle.done:
                        return
            except DaemonUnavailableError as error:
                problem = error
            except ClosedError:
                break
            except FastCheckError as error:
                self._handle._finish(as_save_error(error))
                return
            now = time.monotonic()
            if lost_at is None or now - began > _HELD_S:
                lost_at = now
            if now - lost_at > _AWAY_S_MAX:
                self._handle._finish(problem)
                return
            self._closing.wait(_REATTACH_INTERVAL_S)
        self._handle._finish(
            ClosedError(
                f"the Checkpointer was closed before step {self._handle.step} was committed; "
                "the daemon goes on with it"
            )
        )
