"""Whole save plans: what every rank is to write, and what of a step's metadata nobody writes.

With `enable_plan_caching=True` torch's planners send an empty plan with `usable=False` where a plan is as it was at
their last save. The rank then takes its last one from a cache of the planner's class. That cache has plans as this
package sent them, with items moved between ranks (`families.py`), while the coordinator compares plans from before the
move. To move what has changed, and leave the rest to the caches, would lose items. So the coordinator keeps the plans
as the planner made them, and every rank is sent a whole one at every save.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from ..errors import InvalidArgumentError

#: Jobs of this process whose last plans are kept.
_JOBS_MAX = 16
_LACKING_SHOWN_MAX = 3
_lock = threading.Lock()
#: Job → its last plans as the planner made them, by rank; the job that was saved last comes last.
_last: OrderedDict[str, list[SavePlan]] = OrderedDict()


def whole(job: str, plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans with the last ones in place of those that say "as before". The coordinator calls it at every save.

    torch's cache does not tell jobs apart: the first save of a job may be "as before" because another job's plans were
    the same. A wrong guess is refused before anything is committed, for its plans then lack something (`lacking`).

    Raises:
        InvalidArgumentError: this process has not seen a plan that is to be used again.
    """
    with _lock:
        last = _last.get(job) or next(reversed(_last.values()), [])
        unchanged = [rank for rank, plan in enumerate(plans) if not getattr(plan, "usable", True)]
        if unchanged and len(last) != len(plans):
            raise InvalidArgumentError(
                f"the save planner says that the plan of rank {unchanged[0]} is that of its last save, which was none "
                "to FastCheck by this process: torch keeps plans by the planner's class, for all storages together. "
                "Make the planner without enable_plan_caching, or give FastCheck's a class of its own"
            )
        found = [last[rank] if rank in unchanged else plan for rank, plan in enumerate(plans)]
        _last[job] = found
        _last.move_to_end(job)
        while len(_last) > _JOBS_MAX:
            _last.popitem(last=False)
    return found


def check_complete(metadata: Metadata, written: Iterable[MetadataIndex]) -> None:
    """Refuse a step that lacks something its metadata names.

    Raises:
        InvalidArgumentError: it names what.
    """
    there: dict[str, set[tuple[int, ...] | None]] = {}
    for index in written:
        offset = None if index.offset is None else tuple(index.offset)
        there.setdefault(index.fqn, set()).add(offset)
    missing: list[str] = []
    for fqn, known in metadata.state_dict_metadata.items():
        boxes = there.get(fqn, set())
        if not isinstance(known, TensorStorageMetadata):
            missing += [] if boxes else [repr(fqn)]
        elif None not in boxes:  # a planner that names no offsets has whole tensors
            absent = [chunk for chunk in known.chunks if tuple(chunk.offsets) not in boxes]
            missing += [f"{fqn!r} at {tuple(chunk.offsets)}" for chunk in absent]
    if missing:
        shown = ", ".join(missing[:_LACKING_SHOWN_MAX])
        more = f" and {len(missing) - _LACKING_SHOWN_MAX} more" if len(missing) > _LACKING_SHOWN_MAX else ""
        raise InvalidArgumentError(
            f"what the save planner had the ranks write lacks {shown}{more}, which its metadata names: the plans must "
            "have every item of create_global_plan's metadata. If the planner caches plans, make it without "
            "enable_plan_caching"
        )
