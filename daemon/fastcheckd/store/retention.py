"""Which replicas may go. Pure.

Follows the registry's view of committed steps; for provisional steps, which no view knows, what their owner says it
gave up unreported. When in doubt a replica stays: the only copy of a step is worth more than the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

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


#: Provisional steps of a shard that stay, whatever their owner says: ranks that stopped at different steps have
#: one in common.
PROVISIONAL_KEPT = 3


def provisional_to_drop(
    held: Iterable[pb.ShardManifest], coming: pb.ShardManifest, obsolete_steps: Collection[int]
) -> list[int]:
    """The provisional steps of a shard that may go because newer provisional ones of it are here.

    Age alone does not do: a step whose report was on its way when the quorum was lost may be committed, and no view
    says so before the quorum is back. Its owner knows whether it has ever reported it.

    Args:
        held: the replicas of that shard here, of one kind.
        coming: a newer one, about to be put by the owner.
        obsolete_steps: what that owner gave up without having reported it.

    Returns:
        Steps, the oldest first; none of them another owner's or another session's.
    """
    provisional = sorted(
        (m.key.step for m in held if m.provisional and m.key.step < coming.key.step), reverse=True
    )
    own = {m.key.step for m in held if (m.owner, m.session) == (coming.owner, coming.session)}
    return sorted(step for step in provisional[PROVISIONAL_KEPT:] if step in own and step in obsolete_steps)
