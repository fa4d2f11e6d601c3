"""A trainer's session as one speaks it oneself: what to say, and what is heard, message by message."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from types import TracebackType
from typing import Any

import grpc

from fastcheck_proto.conventions import ERROR_METADATA_KEY
from fastcheck_proto.v1 import common_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb
from fastcheck_proto.v1.trainer_pb2_grpc import TrainerServiceStub

HEAR_S = 30.0


def error_name(error: grpc.RpcError) -> str:
    """The daemon's name for it, or else gRPC's."""
    found = dict(tuple(error.trailing_metadata() or ())).get(ERROR_METADATA_KEY)
    return str(found or error.code())


class SpokenSession:
    """A stream. A context: when it ends, so does the stream."""

    def __init__(
        self, stub: TrainerServiceStub, job: str, client_id: str, rank: int = 0, **more: Any
    ) -> None:
        self.job, self.rank = job, rank
        self._requests: queue.Queue[pb.TrainerMessage | None] = queue.Queue()
        self._heard: list[pb.DaemonMessage] = []
        self._changed = threading.Condition()
        #: How the stream ended: the error's name, or empty in good order; None: it has not.
        self.ended: str | None = None
        #: What the error said.
        self.details = ""
        opening = pb.OpenSession(job=job, rank=rank, client_id=client_id, **{"world_size": 1, **more})
        self.say(open=opening)
        self._call = stub.Session(iter(self._requests.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        ended = ""
        try:
            for message in self._call:
                with self._changed:
                    self._heard.append(message)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            ended, self.details = error_name(error), error.details() or ""
        self._requests.put(None)
        with self._changed:
            self.ended = ended
            self._changed.notify_all()

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._requests.put(pb.TrainerMessage(**message))

    def hear(self, kind: str, timeout_s: float = HEAR_S) -> Any:
        """The next message of a kind that was not heard yet; None: the stream has ended without one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for message in self._heard:
                    if message.HasField(kind):
                        self._heard.remove(message)
                        return getattr(message, kind)
                if self.ended is not None:
                    return None
                assert self._changed.wait(deadline - time.monotonic()), f"no {kind} came"

    def opened(self) -> int:
        """The session's number; raises AssertionError with the error's name if it is refused."""
        found = self.hear("opened")
        assert found is not None, self.ended
        return int(found.session)

    def segment(self, state_bytes: int, step: int | None = None) -> pb.OfferedSegment:
        """A segment to fill."""
        self.say(reserve=pb.ReserveMemory(state_bytes=state_bytes, step=step))
        found = self.hear("segment")
        assert found is not None, self.ended
        return found

    def refusal(self) -> str:
        """The name of the error that a step or the reservation is refused with, or the stream's."""
        found = self.hear("refused")
        return str(self.ended) if found is None else common_pb2.ErrorCode.Name(found.error.code)

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()
        with self._changed, contextlib.suppress(AssertionError):
            self._changed.wait_for(lambda: self.ended is not None, HEAR_S)

    def __enter__(self) -> SpokenSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
