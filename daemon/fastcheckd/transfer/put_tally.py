"""What a put took: bytes on the lane, time inside sockets, and which codecs the chunks went by."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..codec.encoder import Use
from .codec_uses import summed


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """A copy that a holder acknowledged."""

    #: Of the shard, 16 bytes.
    digest: bytes
    #: Step that the holder changed in place; None: the shard went whole.
    base_step: int | None
    #: Payload bytes on the lane, repeats included.
    sent_bytes: int
    #: Size of the shard.
    raw_bytes: int
    #: The holder had to use memory for the first time, which says nothing about later puts.
    fresh_memory: bool
    #: Longest time that one of the connections was inside socket sends.
    send_s: float
    #: By codec; repeats count in place of what arrived bad.
    uses: tuple[Use, ...]


class PutTally:
    """Of one put under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._sending_s: dict[int, float] = {}
        self._uses: dict[int, tuple[Use, ...]] = {}

    def sent(self, count: int) -> None:
        """Payload bytes went out."""
        with self._lock:
            self._sent_bytes += count

    def sending_s(self, connection: int, seconds: float) -> None:
        """So long a connection was inside socket sends, all in all."""
        with self._lock:
            self._sending_s[connection] = seconds

    def used(self, index: int, uses: tuple[Use, ...]) -> None:
        """How a chunk went; the last time counts."""
        with self._lock:
            self._uses[index] = uses

    def outcome(
        self, *, digest: bytes, base_step: int | None, raw_bytes: int, fresh_memory: bool
    ) -> PutOutcome:
        """The put is acknowledged."""
        with self._lock:
            return PutOutcome(
                digest=digest,
                base_step=base_step,
                sent_bytes=self._sent_bytes,
                raw_bytes=raw_bytes,
                fresh_memory=fresh_memory,
                send_s=max(self._sending_s.values(), default=0.0),
                uses=summed(use for uses in self._uses.values() for use in uses),
            )
