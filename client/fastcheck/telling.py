"""Telling the daemon how far a copy is while it goes on: it then sends what is there.

Nothing depends on it: a daemon that is not told has everything when the segment is sealed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from fastcheck_proto.v1 import trainer_pb2 as pb

from .daemon import CONNECT_S, Daemon
from .errors import FastCheckError
from .front import Front

#: How often a copy that goes on is looked at.
_LOOK_S = 0.005
#: News that are worth a message: a chunk of the daemon's.
_NEWS_BYTES = 4 << 20


class Telling:
    """Tells the daemon of a copy until `end`, from a thread of gRPC's."""

    def __init__(self, daemon: Daemon, save_id: str, front: Front) -> None:
        self._save_id = save_id
        self._front = front
        self._over = threading.Event()
        self._call: grpc.Future[pb.FollowCopyResponse] | None = None
        try:
            self._call = daemon.follow_copy(self._news(), connect_s=CONNECT_S)
        except FastCheckError:
            self.end()  # the seal finds out what is wrong

    def _news(self) -> Iterator[pb.FollowCopyRequest]:
        told = 0
        yield pb.FollowCopyRequest(save_id=self._save_id)
        while not self._over.wait(_LOOK_S):
            reach = self._front.reach()
            if reach >= told + _NEWS_BYTES:
                told = reach
                yield pb.FollowCopyRequest(filled_bytes=reach)

    def end(self) -> None:
        """The segment is sealed, or given back."""
        self._over.set()
        if self._call is not None:
            self._call.cancel()
