"""`FastCheckReader`: what DCP's load planner asks for, read from any ranks' states of a committed step.

Of each box only the chunks that it touches are brought here, and its bytes go straight into the planner's tensors.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fastcheck_proto.v1 import trainer_pb2 as pb

from ..config import resolve
from ..connection import parse_address
from ..daemon import PATIENT_CONNECT_S, Daemon
from ..errors import (
    InvalidArgumentError,
    LoadFailedError,
    LossyCheckpointError,
    StateMismatchError,
    StepNotFoundError,
    UnsupportedStateError,
)
from ..state.tensors import DTYPES, why_unsupported
from ..step_reader import BoxInto, StepReader
from .checkpoint_id import CheckpointId, agreed_job, names_a_step, parse_checkpoint_id, url_of
from .metadata import StepIndex, index_of

#: What is read at once takes as much of the daemon's memory.
BATCH_BYTES_MAX = 1 << 30
_STEPS_SHOWN_MAX = 10


@dataclass(frozen=True)
class _Opened:
    """A step that is being loaded."""

    reader: StepReader
    index: StepIndex


class FastCheckReader(StorageReader):
    """Loads from FastCheck what torch.distributed.checkpoint asks for, on any number of ranks and any mesh.

    Args:
        job, checkpoint_id, address: As of `FastCheckWriter`; without `checkpoint_id` the newest committed step.
        allow_lossy: Whether steps that were saved with a lossy coding will do.
        timeout_s: Longest that one read may take.

    It takes nobody's place: any process may read while the job trains. See docs/dcp.md.

    Raises:
        InvalidArgumentError: an argument is not usable.
    """

    def __init__(
        self,
        job: str | None = None,
        checkpoint_id: CheckpointId | None = None,
        *,
        address: str | None = None,
        allow_lossy: bool = False,
        timeout_s: float = 3600.0,
    ) -> None:
        super().__init__()
        self._wanted_job = job
        self._wanted_address = address
        self._allow_lossy = allow_lossy
        self._timeout_s = timeout_s
        self._job: str | None = None
        self._step: int | None = None
        self._load_id = ""
        self._daemon: Daemon | None = None
        self._opened: _Opened | None = None
        self.reset(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but connections and what was read."""
        return vars(self) | {"_daemon": None, "_opened": None}

    @property
    def checkpoint_id(self) -> str | None:
        """The step that is loaded next, or was loaded last, as URL; None: the newest, and nothing was loaded yet."""
        step = self._step if self._opened is None else self._opened.reader.step
        return None if step is None or self._job is None else url_of(self._job, step)

    @property
    def step(self) -> int | None:
        """The step that was loaded last; None before."""
        return None if self._opened is None else self._opened.reader.step

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """A new load begins; without `checkpoint_id` it is of the step that was named last, or of the newest.

        Raises:
            InvalidArgumentError: it names no step, or another job.
        """
        self._opened = None
        self._load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            name = parse_checkpoint_id(checkpoint_id)
            job = agreed_job(self._wanted_job, name)
            self._job, self._step = resolve(job, rank=0, world_size=1).job, name.step

    def newest(self) -> int | None:
        """The job's newest committed step; None: it has none, or FASTCHECK_DISABLE is set. Asks anew each time.

        DCP tells what is wrong with a load in text (torch 2.13 makes an AssertionError of what `read_metadata` raises):
        ask here whether there is something to load, rather than catch what says that there is not.

        Raises:
            DaemonUnavailableError, RegistryUnavailableError: it cannot be known now.
        """
        identity = resolve(self._wanted_job or self._job, rank=0, world_size=1, address=self._wanted_address)
        if not identity.enabled:
            return None
        return max(self._steps(self._connected(identity.address), identity.job), default=None)

    # Not named kwargs on purpose: DCP would ask a second time, for a rank's own metadata, which there is not.
    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """The step's metadata, from what all its ranks saved.

        Raises:
            StepNotFoundError: the step is not kept; the message has those that are.
            LossyCheckpointError: it is not exact, and exactness is asked for.
            LoadFailedError: it was not saved by DCP, or cannot be had.
        """
        identity = resolve(self._wanted_job or self._job, rank=0, world_size=1, address=self._wanted_address)
        if not identity.enabled:
            raise LoadFailedError(
                "FASTCHECK_DISABLE is set, so nothing can be loaded from FastCheck: load from your durable checkpoint"
            )
        self._job = identity.job
        daemon = self._connected(identity.address)
        reader = StepReader(daemon, identity.job, self._step, timeout_s=self._timeout_s)
        try:
            reader.__enter__()
        except StepNotFoundError as error:
            raise StepNotFoundError(f"{error}. {self._kept(daemon, identity.job)}") from None
        if reader.lossy and not self._allow_lossy:
            raise LossyCheckpointError(
                f"step {reader.step} was saved with a lossy coding (precision= of its writer): "
                "FastCheckReader(allow_lossy=True) loads it"
            )
        what = f"step {reader.step} of job {identity.job!r}"
        headers = {number: rank.header for number, rank in reader.ranks.items()}
        self._opened = _Opened(reader, index_of(headers, what))
        metadata = self._opened.index.metadata
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up: `read_metadata` did."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which step this rank has looked up."""
        return replace(plan, storage_data=self.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks load the same step.

        Raises:
            LoadFailedError: a newer one was committed while they looked it up.
        """
        steps = sorted({plan.storage_data for plan in plans})
        if len(steps) > 1:
            raise LoadFailedError(
                f"ranks found different newest steps ({', '.join(map(str, steps))}), for the job is saving meanwhile: "
                f"name one, such as checkpoint_id='step-{steps[0]}'"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; the future is complete.

        Raises:
            StateMismatchError, UnsupportedStateError: the planner gave a tensor that cannot take it, by name.
            LoadFailedError: the bytes cannot be had, or are damaged. Some of the planner's tensors are filled then.
        """
        opened = self._opened
        if opened is None:
            raise InvalidArgumentError("read_metadata was not called: this FastCheckReader is in no load")
        for batch in _batches(plan.items, opened.index):
            _read(batch, opened, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return names_a_step(checkpoint_id)

    def close(self) -> None:
        """End the connection; the next load makes a new one."""
        daemon, self._daemon, self._opened = self._daemon, None, None
        if daemon is not None:
            daemon.close()

    def _connected(self, address: str) -> Daemon:
        if self._daemon is None:
            self._daemon = Daemon(parse_address(address))
        return self._daemon

    def _steps(self, daemon: Daemon, job: str) -> list[int]:
        request = pb.ListStepsRequest(job=job)
        return list(daemon.list_steps(request, connect_s=PATIENT_CONNECT_S, timeout_s=self._timeout_s).steps)

    def _kept(self, daemon: Daemon, job: str) -> str:
        steps = self._steps(daemon, job)
        if not steps:
            return f"No step of job {job!r} is committed: is that the job's name?"
        shown = ", ".join(map(str, steps[-_STEPS_SHOWN_MAX:]))
        return f"Committed steps of job {job!r}: {'..., ' if len(steps) > _STEPS_SHOWN_MAX else ''}{shown}"


def _batches(items: list[ReadItem], index: StepIndex) -> Iterator[list[ReadItem]]:
    """Items in order of where they lie, so many at once as the daemon's memory should be used for."""
    placed = sorted(items, key=lambda item: _place(item, index))
    batch: list[ReadItem] = []
    size = 0
    for item in placed:
        more = _bytes(item, index)
        if batch and size + more > BATCH_BYTES_MAX:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch


def _place(item: ReadItem, index: StepIndex) -> tuple[int, int]:
    stored = index.find(item.storage_index)
    return stored.rank, stored.record.offset


def _bytes(item: ReadItem, index: StepIndex) -> int:
    record = index.find(item.storage_index).record
    if item.type == LoadItemType.BYTE_IO or not record.bytes:
        return record.bytes
    elements = 1
    for length in record.shape:
        elements *= length
    return int(item.lengths.numel()) * (record.bytes // elements)


def _read(batch: list[ReadItem], opened: _Opened, planner: LoadPlanner) -> None:
    boxes: list[BoxInto] = []
    targets: list[torch.Tensor | None] = []
    for item in batch:
        rank, record = opened.index.find(item.storage_index)
        if item.type == LoadItemType.BYTE_IO:
            into = torch.empty(record.bytes, dtype=torch.uint8)
            boxes.append(BoxInto(rank, record, (0,), (record.bytes,), into))
            targets.append(None)
        else:
            target = planner.resolve_tensor(item).detach()
            into = _staging(item, target, record.dtype)
            boxes.append(BoxInto(rank, record, tuple(item.storage_offsets), tuple(item.lengths), into))
            targets.append(target)
    opened.reader.fill(boxes)
    for item, box, filled in zip(batch, boxes, targets, strict=True):
        if filled is None:
            planner.load_bytes(item, io.BytesIO(box.target.numpy().tobytes()))
        else:
            if box.target is not filled:
                filled.copy_(box.target)
            planner.commit_tensor(item, filled)


def _staging(item: ReadItem, target: torch.Tensor, dtype: str) -> torch.Tensor:
    """What is filled: the planner's tensor itself, or one beside it where DCP converts the dtype."""
    fqn = item.dest_index.fqn
    if reason := why_unsupported(target):
        raise UnsupportedStateError(f"{fqn!r} {reason}")
    if target.shape != item.lengths:
        raise StateMismatchError(
            [
                f"{fqn!r}: a box of {tuple(item.lengths)} was to go into a tensor of shape {tuple(target.shape)}"
            ]
        )
    if str(target.dtype) == f"torch.{dtype}":
        return target
    return torch.empty(target.shape, dtype=DTYPES[dtype])
