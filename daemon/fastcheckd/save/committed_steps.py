"""Which steps are known here to be committed: a commit is seen here before the registry's next view tells of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastcheck_proto.v1 import common_pb2 as pb

from ..store.replica_store import ReplicaStore
from ..view import ViewFollower
from .save import SaveKey


class Committed:
    """The newest step of each job that was seen being committed here. Owned by the event loop's thread."""

    def __init__(self, store: ReplicaStore, view: ViewFollower) -> None:
        self._store = store
        self._view = view
        #: Newest session of a job of which a step was committed from here, and its newest such step.
        self._seen: dict[str, tuple[int, int]] = {}
        self._seen_at: dict[str, float] = {}

    @property
    def seen_at(self) -> Mapping[str, float]:
        """Job → when a step of it was last seen being committed, by the monotonic clock."""
        return self._seen_at

    def saw(self, key: SaveKey, session: int, now: float) -> None:
        """A save of this node was committed."""
        self._seen_at[key.job] = now
        self._seen[key.job] = max(self._seen.get(key.job, (0, -1)), (session, key.step))

    def forget_except(self, jobs: Collection[str]) -> None:
        """Of jobs that nobody saves here any more, the view says enough."""
        for job in self._seen.keys() - jobs:
            del self._seen[job], self._seen_at[job]

    def newest(self, job: str) -> int:
        """Newest committed step that is known of; -1: none."""
        return max(self._view.newest_step(job) or -1, self.newest_seen(job))

    def newest_seen(self, job: str) -> int:
        """Newest step that was seen being committed here, unless it may have been deleted since; -1: none."""
        session, step = self._seen.get(job, (0, -1))
        return -1 if self._view.is_void(job, session) else step

    def by_an_earlier_life(self, key: SaveKey, session: int) -> bool:
        """Whether an earlier life of this process had the step committed, and could not say so any more."""
        return key.step in self._view.kept_steps().get(key.job, ()) and any(
            held.kind == pb.REPLICA_KIND_OWNER
            and held.key.rank == key.rank
            and held.manifest.session == session
            for held in self._store.held(key.job, key.step)
        )
