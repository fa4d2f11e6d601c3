"""Authenticates the messages between voters with the cluster's Raft key. Pure.

Every message on a connection carries an HMAC-SHA256 over who sent it (the connecting or the accepting
side) and its number, so it cannot be forged, reflected, repeated or left out. pysyncobj adds a random
challenge per connection, so a recorded connection cannot be replayed either. It does not hide what
is said: Raft messages hold node names, addresses and digests. Standard library only; pysyncobj's own
scheme would need the `cryptography` package and numbers nothing.
"""

from __future__ import annotations

import hashlib
import hmac

TAG_BYTES = 32


def derive_key(secret: bytes, cluster_id: str) -> bytes:
    """The MAC key of a cluster: two clusters that share a key file still do not mix."""
    return hmac.new(secret, b"fastcheck raft 1 " + cluster_id.encode(), hashlib.sha256).digest()


class Seal:
    """One end of one connection. The methods have the names that pysyncobj calls on its encryptor."""

    def __init__(self, key: bytes, *, accepting: bool = False) -> None:
        self._key = key
        self._accepting = accepting
        self._sent = 0
        self._received = 0

    def fresh(self, *, accepting: bool) -> Seal:
        """A seal with the same key for another connection."""
        return Seal(self._key, accepting=accepting)

    def _tag(self, from_accepting: bool, number: int, data: bytes) -> bytes:
        prefix = bytes([from_accepting]) + number.to_bytes(8, "big")
        return hmac.new(self._key, prefix + data, hashlib.sha256).digest()

    def encrypt_at_time(self, data: bytes, _now: int) -> bytes:
        """Seal a message."""
        tag = self._tag(self._accepting, self._sent, data)
        self._sent += 1
        return tag + data

    def extract_timestamp(self, _sealed: bytes) -> int:
        """Always 0: messages are numbered instead."""
        return 0

    def decrypt(self, sealed: bytes) -> bytes:
        """Open a message.

        Raises:
            ValueError: it does not come from the other end of this connection, or not in this order.
        """
        tag, data = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(not self._accepting, self._received, data)):
            raise ValueError("a Raft message failed its authentication")
        self._received += 1
        return data
