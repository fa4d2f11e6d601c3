"""Takes the code out of pysyncobj's pickles: plain values go in, nothing else comes out.

pysyncobj speaks pickle between voters. A pickle can name any callable and run it. Messages are
authenticated before they are read, but a voter's key must not be worth code on the other voters. So
pysyncobj's `dumps` writes a protocol that holds bytes natively, and its `loads` knows no names at all:
None, bool, int, float, str, bytes, list, tuple, dict and set pass, everything else is refused.
On disk nothing of ours is pickled. The one exception is pysyncobj's own: the log's entries that change the
membership, which are read by these functions too (`engine`).
"""

from __future__ import annotations

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
