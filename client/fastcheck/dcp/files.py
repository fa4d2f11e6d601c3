"""Files behind a `fastcheck://` URL: one that is being written, and those of a committed step.

A file that is written stays in memory until it is closed, then it is handed over whole. The memory is an anonymous file
(memfd), so that a writer who calls fsync on it finds something to sync: otherwise DCP would sync all of the machine's
disks.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from fastcheck_proto.v1 import state_pb2

from ..state.header import entries
from ..step_reader import BoxInto, StepReader

#: Size and number of the blocks that are read and kept; torch.load goes back and forth within an item.
_BLOCK_BYTES = 16 << 20
_BLOCKS_MAX = 16


class Spool(io.RawIOBase):
    """A writable stream.

    Args:
        path: For messages, and for whoever is handed the file.
        closed: Called once with this object when it is closed; not if a `with` block ends by an exception.
    """

    def __init__(self, path: str, closed: Callable[[Spool], None]) -> None:
        super().__init__()
        self.path = path
        self._hand_over = closed
        self._fd = os.memfd_create("fastcheck-spool", os.MFD_CLOEXEC)
        self._size = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any, /) -> int:
        """Append all of `data`; its size in bytes."""
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            written += os.write(self._fd, view[written:])
        self._size += written
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def fileno(self) -> int:
        """The memory's."""
        return self._fd

    def tensor(self) -> torch.Tensor:
        """What was written: flat uint8, over the file's own memory."""
        if not self._size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self._fd, self._size), dtype=torch.uint8)

    def close(self) -> None:
        """Hand the file over; raises what that raises. A second time does nothing."""
        if self.closed:
            return
        super().close()
        self._hand_over(self)

    def discard(self) -> None:
        """Close without handing it over."""
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        """What was never closed is not handed over."""
        if not self.closed:
            self.discard()
        os.close(self._fd)


@dataclass(frozen=True)
class StepFiles:
    """A step's files by name: rank and record; none if something else saved it."""

    reader: StepReader
    stored: Mapping[str, tuple[int, state_pb2.TensorRecord]]

    @staticmethod
    def of(reader: StepReader) -> StepFiles:
        """The files of a step whose headers were read."""
        stored: dict[str, tuple[int, state_pb2.TensorRecord]] = {}
        for number, rank in reader.ranks.items():
            files = entries(rank.header.root.dict).get("files")
            for name, value in entries(files.dict).items() if files is not None else ():
                if value.WhichOneof("kind") == "tensor":
                    stored[str(name)] = number, rank.header.tensors[value.tensor]
        return StepFiles(reader, stored)


class StepFile(AbstractBufferedFile):  # type: ignore[misc]  # as above
    """A committed file, of which only blocks that are touched are brought here."""

    def __init__(self, fs: AbstractFileSystem, path: str, files: StepFiles, name: str) -> None:
        self._rank, self._record = files.stored[name]
        self._reader = files.reader
        super().__init__(
            fs,
            path,
            "rb",
            block_size=_BLOCK_BYTES,
            cache_type="blockcache",
            cache_options={"maxblocks": _BLOCKS_MAX},
            size=self._record.bytes,
        )

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self._record.bytes)  # the last block is not whole
        into = torch.empty(end - start, dtype=torch.uint8)
        self._reader.fill([BoxInto(self._rank, self._record, (start,), (end - start,), into)])
        return into.numpy().tobytes()
