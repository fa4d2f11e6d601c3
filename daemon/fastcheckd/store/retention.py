"""Which replicas may go. Pure.

Follows the registry's view of committed steps; for provisional steps, which no view knows, what their owner says it
gave up unreported. When in doubt a replica stays: the only copy of a step is worth more than the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb


@dataclass(frozen=True)
class Kept:
    """What a view says of a job."""

    #: Committed steps that are kept.
    steps: frozenset[int] = frozenset()
    #: Sessions below this are over for good: what they made can be committed no more.
    void_below_session: int = 0
    #: The view says nothing of what sessions from this on made; 0: it is of a version that does not tell.
    next_session: int = 0
    #: Pairs of a step and a session: nothing below both will be committed any more.
    superseded: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, job: rpb.JobView) -> Kept:
        """From the view."""
        return cls(
            frozenset(job.kept_steps),
            max(job.void_below_session, job.live_from_session),
            job.next_session,
            tuple((each.below_step, each.below_session) for each in job.superseded),
        )

    def rules_out(self, step: int, session: int) -> bool:
        """Whether a step that is not kept can be committed no more."""
        return session < self.void_below_session or any(
            step < below_step and session < below_session for below_step, below_session in self.superseded
        )


#: A replica: kind, key, and the session that made it.
Held = tuple[pb.ReplicaKind.ValueType, pb.ShardKey, int]


def what_to_drop(held: Iterable[Held], jobs: Mapping[str, Kept]) -> list[Held]:
    """The replicas that no restore will ask for.

    Args:
        held: each replica that is held.
        jobs: what a view, perhaps an old one, says of each job that the registry knows.

    Those of steps that are not kept, and either older than the job's newest committed step, or superseded, or made by
    a session that is over for good. A newer step may be under way; a job that the registry does not know (yet) is
    left alone. After a deletion lower numbers may be saved anew: by sessions that a view from before the deletion does
    not know.
    """
    drop = []
    for replica in held:
        _, key, session = replica
        kept = jobs.get(key.job)
        if kept is None or key.step in kept.steps:
            continue
        known = not kept.next_session or session < kept.next_session
        passed = bool(kept.steps) and key.step < max(kept.steps) and known
        if passed or kept.rules_out(key.step, session):
            drop.append(replica)
    return drop


#: Provisional steps of a shard that stay, whatever their owner says: ranks that stopped at different steps have
#: one in common.
PROVISIONAL_KEPT = 3


def provisional_to_drop(
    held: Iterable[pb.ShardManifest],
    coming: pb.ShardManifest,
    obsolete_steps: Collection[int],
    kept_steps: Collection[int] = (),
) -> list[int]:
    """The provisional steps of a shard that may go because newer provisional ones of it are here.

    Age alone does not do: a step whose report was on its way when the quorum was lost may be committed, and no view
    says so before the quorum is back. Its owner knows whether it has ever reported it.

    Args:
        held: the replicas of that shard here, of one kind.
        coming: a newer one, about to come from the owner.
        obsolete_steps: what that owner gave up without having reported it.
        kept_steps: committed steps of the job, by the newest view: none of them goes.

    Returns:
        Steps, the oldest first; none of them another owner's or another session's.
    """
    provisional = sorted(
        (m.key.step for m in held if m.provisional and m.key.step < coming.key.step), reverse=True
    )
    own = {m.key.step for m in held if (m.owner, m.session) == (coming.owner, coming.session)}
    may_go = own.intersection(obsolete_steps).difference(kept_steps)
    return sorted(may_go.intersection(provisional[PROVISIONAL_KEPT:]))
