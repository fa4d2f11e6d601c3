"""`FastCheckWriter`: DCP's write items of a rank become one FastCheck state, saved by the ordinary Checkpointer.

DCP calls, per save and from one thread: reset, storage_meta, set_up_storage_writer, prepare_local_plan on all ranks;
prepare_global_plan on the coordinator; write_data on all; finish on the coordinator, if all ranks wrote. What a save is
about is kept from set_up_storage_writer on, so a reset by somebody else cannot lead its bytes to another step.
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import uuid
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..config import resolve
from ..errors import InvalidArgumentError, UnsupportedStateError
from ..handle import SaveHandle
from ..state.sharding import local_of
from ..state.tensors import why_unsupported
from .checkpoint_id import CheckpointId, agreed_job, names_a_step, parse_checkpoint_id, url_of
from .checkpointer_pool import CheckpointerOptions, checkpointer_of, close_job
from .metadata import Item, Kind, nested, write_description
from .save_plans import check_complete, complete_plans, group_families, savable_tensors

_KINDS: dict[WriteItemType, Kind] = {
    WriteItemType.TENSOR: "tensor",
    WriteItemType.SHARD: "shard",
    WriteItemType.BYTE_IO: "bytes",
}


class Assignment(NamedTuple):
    """Which rank of how many a plan is for, and how many items it has; travels in `SavePlan.storage_data`."""

    rank: int
    world_size: int
    items: int = 0


@dataclasses.dataclass
class _Save:
    """One save, from set_up_storage_writer on."""

    job: str
    step: int
    thread: int
    #: As DCP gave them; None in versions that do not.
    rank: int | None = None
    collective: bool = True
    #: What the plans of all ranks have; only where they were made, which is the coordinator.
    planned: list[MetadataIndex] | None = None
    handle: SaveHandle | None = None


class FastCheckWriter(StorageWriter):
    """Saves to FastCheck what torch.distributed.checkpoint asks it to; one object may serve all steps.

    Args:
        job: Name of the job; else from a URL in `checkpoint_id`, else from the environment as `Checkpointer` does.
        checkpoint_id: The first step, if DCP is not given one: "step-100", "100", 100 or "fastcheck://job/step-100".
        address, max_in_flight, copy_threads, precision: As of `Checkpointer`.
        connect_timeout_s: Longest wait for room and for the registry, `Checkpointer`'s timeout_s.
        timeout_s: Longest wait for a step's copies, and then for its commit.

    Making, pickling and resetting one needs no daemon. It has the rank's place in the job: a `Checkpointer` needs a
    job name of its own beside it. See docs/dcp.md.

    Raises:
        InvalidArgumentError: an argument is not usable.
    """

    def __init__(
        self,
        job: str | None = None,
        checkpoint_id: CheckpointId | None = None,
        *,
        address: str | None = None,
        max_in_flight: int = 0,
        copy_threads: int | None = None,
        precision: str = "exact",
        connect_timeout_s: float = 60.0,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__()
        self._wanted_job = job
        self._options = CheckpointerOptions(
            address, max_in_flight, copy_threads, connect_timeout_s, precision
        )
        self._timeout_s = timeout_s
        self._job: str | None = None
        self._step: int | None = None
        self._save_id = ""
        self._lock = threading.Lock()
        self._save: _Save | None = None
        self._writing = False
        self.reset(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but a save under way: the other process begins its own."""
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_save", "_writing")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _save=None, _writing=False)

    @property
    def checkpoint_id(self) -> str | None:
        """The step that is saved next, or was saved last, as URL."""
        return None if self._step is None or self._job is None else url_of(self._job, self._step)

    @property
    def handle(self) -> SaveHandle | None:
        """This rank's handle of the last save: its `stats` and whether it is committed. None before the first."""
        return self._save.handle if self._save is not None else None

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """A new save begins; without `checkpoint_id` the step stays as it is.

        Raises:
            InvalidArgumentError: it names no step or another job, or another save uses this writer just now.
        """
        with self._lock:
            self._refuse_while_writing()
            self._save_id = str(uuid.uuid4())
            if checkpoint_id is not None:
                name = parse_checkpoint_id(checkpoint_id)
                self._job = resolve(agreed_job(self._wanted_job, name), rank=0, world_size=1).job
                self._step = name.step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Settle what this save is about."""
        with self._lock:
            self._refuse_while_writing()
            if self._job is None or self._step is None:
                raise InvalidArgumentError(
                    "no checkpoint_id says which step this is: dcp.save(..., checkpoint_id='step-100')"
                )
            self._save = _Save(
                self._job,
                self._step,
                threading.get_ident(),
                kwargs.get("rank"),
                kwargs.get("use_collectives", True),
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say what this rank could save, before others' copies are left out."""
        return dataclasses.replace(plan, storage_data=savable_tensors(plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Put what belongs together onto one rank, and tell every rank its place and its whole plan."""
        save = self._own_save()
        plans = complete_plans(save.job, plans)
        if save.collective:
            plans = group_families(plans)
            places = [Assignment(rank, len(plans)) for rank in range(len(plans))]
        else:
            places = [_assignment_without_collectives(save.rank)]
        save.planned = [item.index for plan in plans for item in plan.items]
        return [
            dataclasses.replace(plan, storage_data=place._replace(items=len(plan.items)))
            for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's items; the future is complete, for this returns when they are replicated.

        Raises:
            UnsupportedStateError: an item cannot be saved; the message names it.
            InvalidArgumentError: two savers use this writer, or this rank, at once; or the plans lack something that
                the planner's metadata names.
            FastCheckError: what went wrong on the way.
        """
        with self._lock:
            save = self._own_save()
            self._refuse_while_writing()
            self._writing = True
        try:
            results = self._write(save, plan, planner)
        finally:
            self._writing = False
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all was written, and wait until the step is committed.

        Raises:
            InvalidArgumentError: the ranks did not write all that the metadata names.
            FastCheckError: the step is not committed, and why.
        """
        metadata.storage_meta = self.storage_meta()
        save = self._own_save()
        check_complete(metadata, (each.index for of_rank in results for each in of_rank))
        assert save.handle is not None
        save.handle.result(timeout=self._timeout_s)

    def storage_meta(self) -> StorageMeta | None:
        """What DCP's planners and logs are told about this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return names_a_step(checkpoint_id)

    def close(self) -> None:
        """Close the rank's `Checkpointer`: ends threads and connections that later saves would use again.

        Saves under way go on in the daemon. The writer may be used again; all writers of the job in this process share
        it.
        """
        if self._job is not None:
            close_job(self._job)

    def _refuse_while_writing(self) -> None:
        if self._writing:
            assert self._save is not None
            raise InvalidArgumentError(
                f"this FastCheckWriter is just saving step {self._save.step}: a writer serves one save at a time. Wait "
                "for its end (the future's result()) before the next one, or make a second writer with another job name"
            )

    def _own_save(self) -> _Save:
        save = self._save
        if save is None:
            raise InvalidArgumentError(
                "set_up_storage_writer was not called: this FastCheckWriter is in no save"
            )
        if save.thread != threading.get_ident():
            raise InvalidArgumentError(
                f"another saver began step {save.step} with this FastCheckWriter in the middle of a save: a writer "
                "serves one save at a time. Wait for one save's end (the future's result()) before the next"
            )
        return save

    def _write(self, save: _Save, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        place = plan.storage_data
        if not isinstance(place, Assignment):
            raise InvalidArgumentError(
                "the plan has lost its storage_data between prepare_global_plan and write_data: a save planner's "
                "finish_plan must keep it (dataclasses.replace)"
            )
        # Before anything is saved: the step is committed as soon as all ranks have, and `finish` comes after that.
        if len(plan.items) < place.items:
            raise InvalidArgumentError(
                f"the save planner's finish_plan made {len(plan.items)} items out of the {place.items} that rank "
                f"{place.rank} is to write: it must leave none out"
            )
        metadata = getattr(planner, "metadata", None)  # of DefaultSavePlanner and its kin, on the coordinator
        if save.planned is not None and isinstance(metadata, Metadata):
            check_complete(metadata, save.planned)
        items = [_describe(item) for item in plan.items]
        description = write_description(items, plan.planner_data)
        tensors = [_resolve(item, planner) for item in plan.items]
        state = {"dcp": description, "tensors": _named(items, tensors)}
        with checkpointer_of(save.job, place.rank, place.world_size, self._options) as checkpointer:
            save.handle = checkpointer._save(save.step, state, like=_structure(plan, planner, items, tensors))
            save.handle.wait_replicated(self._timeout_s)
        return [
            WriteResult(index=item.index, size_in_bytes=tensor.nbytes, storage_data=None)
            for item, tensor in zip(plan.items, tensors, strict=True)
        ]


def _assignment_without_collectives(rank: int | None) -> Assignment:
    """Each rank plans for itself: only the process group and the environment say who else does."""
    if dist.is_available() and dist.is_initialized():
        return Assignment(dist.get_rank() if rank is None else rank, dist.get_world_size())
    identity = resolve("unused")
    return Assignment(identity.rank, identity.world_size)


def _describe(item: WriteItem) -> Item:
    kind, fqn = _KINDS[item.type], item.index.fqn
    if kind == "bytes":
        return Item(fqn, kind)
    data = item.tensor_data
    assert data is not None
    return Item(
        fqn,
        kind,
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        tuple(data.size),
        str(data.properties.dtype).removeprefix("torch."),
        data.properties.requires_grad,
    )


def _resolve(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The item's tensor where it is, on any device; an object's bytes as a tensor over the planner's buffer."""
    fqn = item.index.fqn
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        size = data.getbuffer().nbytes
        return (
            torch.frombuffer(data.getbuffer(), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
    tensor = local_of(data).detach()
    if reason := why_unsupported(tensor):
        raise UnsupportedStateError(f"{fqn!r} {reason}")
    assert item.tensor_data is not None
    if tensor.shape != item.tensor_data.chunk.sizes:
        raise UnsupportedStateError(
            f"{fqn!r}: the save planner gave a tensor of shape {tuple(tensor.shape)} for a box of "
            f"{tuple(item.tensor_data.chunk.sizes)}"
        )
    return tensor


def _named(items: list[Item], tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in order, by names for people; of several boxes of one tensor the later ones get a number."""
    named: dict[str, torch.Tensor] = {}
    for number, (item, tensor) in enumerate(zip(items, tensors, strict=True)):
        key = item.fqn
        while key in named:
            key = f"{key}#{number}"
        named[key] = tensor
    return named


def _structure(
    plan: SavePlan, planner: SavePlanner, items: list[Item], tensors: list[torch.Tensor]
) -> dict[Any, Any] | None:
    """The tree that the planner flattened, with this rank's tensors in it; None if it did not say."""
    if not isinstance(plan.planner_data, dict):
        return None
    own = {item.fqn: t for item, t in zip(items, tensors, strict=True) if item.kind != "bytes"}
    # DefaultSavePlanner and its kin; only they know values that other ranks save.
    flat = getattr(planner, "state_dict", None)
    return nested(flat if isinstance(flat, dict) else {}, plan.planner_data, own)
