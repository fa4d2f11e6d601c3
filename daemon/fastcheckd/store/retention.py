"""Which replicas may go. Pure.

Follows the registry's view of committed steps and nothing else. When in doubt a replica stays:
the only copy of a step is worth more than the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fastcheck_proto.v1 import common_pb2 as pb


def what_to_drop(
    held: Iterable[tuple[pb.ReplicaKind.ValueType, pb.ShardKey]],
    kept_steps: Mapping[str, Sequence[int]],
) -> list[tuple[pb.ReplicaKind.ValueType, pb.ShardKey]]:
    """The replicas that no restore will ask for.

    Args:
        held: kind and key of each replica that is held.
        kept_steps: for each job that the registry knows, the committed steps that it keeps, in any order.

    Those older than the job's newest committed step that are not kept themselves. A newer step may
    be under way; a job without a commit, or one that the registry does not know (yet), is left alone.
    """
    drop = []
    for kind, key in held:
        kept = kept_steps.get(key.job, ())
        if kept and key.step < max(kept) and key.step not in kept:
            drop.append((kind, key))
    return drop
