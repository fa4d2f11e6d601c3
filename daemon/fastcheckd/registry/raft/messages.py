"""What voters may say to each other: plain values, authenticated with the cluster's Raft key. Pure.

pysyncobj speaks pickle between voters. A pickle can name any callable and run it. Messages are
authenticated before they are read, but a voter's key must not be worth code on the other voters. So
pysyncobj's `dumps` writes a protocol that holds bytes natively, and its `loads` knows no names at all:
None, bool, int, float, str, bytes, list, tuple, dict and set pass, everything else is refused.
On disk nothing of ours is pickled. The one exception is pysyncobj's own: the log's entries that change the
membership, which are read by these functions too (`engine`).

Without certificates every message on a connection carries an HMAC-SHA256 over who sent it (the connecting or the
accepting side) and its number, so it cannot be forged, reflected, repeated or left out. pysyncobj adds a random
challenge per connection, so a recorded connection cannot be replayed either. It does not hide what is said: Raft
messages hold node names, addresses and digests. Standard library only; pysyncobj's own scheme would need the
`cryptography` package and numbers nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle  # the restricted unpickler below is built on it  # nosec B403
from types import ModuleType
from typing import Any, BinaryIO, NoReturn


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no business in a Raft message")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("a Raft message has no persistent ids")


def loads(data: bytes | str) -> Any:
    """Read plain values.

    Raises:
        pickle.UnpicklingError, EOFError, ValueError, ...: it holds anything else, or is broken.
    """
    return load(io.BytesIO(data.encode() if isinstance(data, str) else data))


def load(file: BinaryIO) -> Any:
    """Read plain values from a file."""
    return _PlainUnpickler(file).load()


def dumps(value: Any, protocol: int | None = None) -> bytes:
    """Write plain values; protocol 5, where bytes need no callable."""
    return pickle.dumps(value, protocol=5)


def dump(value: Any, file: BinaryIO, protocol: int | None = None) -> None:
    """Write plain values to a file."""
    file.write(dumps(value))


def install(*modules: ModuleType) -> None:
    """Replace these functions wherever the modules of pysyncobj bind them."""
    for module in modules:
        for function in (load, loads, dump, dumps):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)


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
