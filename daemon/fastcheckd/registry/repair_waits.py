"""Whom a repair waits for, and what is not tried again yet. Pure: `now` in seconds is given."""

from __future__ import annotations

from collections.abc import Mapping, Set

from fastcheck_proto.v1 import registry_pb2 as rpb

from .model import Ref, ShardId, is_live

#: A machine that restarts with its memory costs less than copying what it held; its daemon needs seconds for that.
GONE_GRACE_S = 5.0
#: A node that came back checks what it has first; as long as it says something, it is waited for.
RETURN_GRACE_S = 5.0
#: After a failure of a shard at a target, doubled with each.
BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 60.0
#: Of a shard that nobody can take or give at present.
NO_TARGET_PAUSE_S = 5.0


class Absences:
    """Lives that are over, and for how long each is still waited for."""

    def __init__(self) -> None:
        self._gone_at: dict[Ref, float] = {}
        #: The node is back, in this newer life, since then or since it last said something.
        self._back: dict[str, tuple[int, float]] = {}
        self._reported: dict[str, int] = {}

    def heard(self, node: Ref, now: float, *, finished: bool) -> None:
        """A node that came back has said what it holds: part of it, or the last part."""
        self._back[node.node_id] = (node.incarnation, now)
        if finished:
            self._reported[node.node_id] = node.incarnation

    def spared(self, dead: Set[Ref], nodes: Mapping[str, rpb.NodeRecord], now: float) -> frozenset[Ref]:
        """Those of the lives that are over whose bytes may come back by themselves, soon."""
        self._gone_at = {ref: self._gone_at.get(ref, now) for ref in dead}
        names = {ref.node_id for ref in dead}
        self._back = {name: seen for name, seen in self._back.items() if name in names}
        self._reported = {name: life for name, life in self._reported.items() if name in names}
        return frozenset(ref for ref in dead if self._is_spared(ref, nodes.get(ref.node_id), now))

    def _is_spared(self, ref: Ref, node: rpb.NodeRecord | None, now: float) -> bool:
        if node is None:
            return False
        if not is_live(node):
            return now < self._gone_at[ref] + GONE_GRACE_S
        incarnation = node.incarnation
        if self._reported.get(ref.node_id) == incarnation:
            return False
        back, heard_at = self._back.get(ref.node_id, (0, 0.0))
        if back != incarnation:
            self._back[ref.node_id] = (incarnation, now)
            return True
        return now < heard_at + RETURN_GRACE_S


class Attempts:
    """What has failed, and when it may be tried again. Bounded by what is short."""

    def __init__(self) -> None:
        self._failures: dict[tuple[ShardId, str], int] = {}
        self._not_before: dict[tuple[ShardId, str], float] = {}
        self._resting: dict[ShardId, float] = {}

    def failed(self, shard: ShardId, target: str, now: float) -> None:
        """A copy could not be made there."""
        count = self._failures[shard, target] = self._failures.get((shard, target), 0) + 1
        self._not_before[shard, target] = now + min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** (count - 1))

    def nobody(self, shard: ShardId, now: float) -> None:
        """No target or no source was to be had."""
        self._resting[shard] = now + NO_TARGET_PAUSE_S

    def resting(self, shard: ShardId, now: float) -> bool:
        """Whether the shard is not to be looked at now."""
        return now < self._resting.get(shard, now)

    def refused(self, shard: ShardId, now: float) -> set[str]:
        """Targets that are not to be tried again now."""
        if not self._not_before:
            return set()
        return {target for (which, target), at in self._not_before.items() if which == shard and now < at}

    def membership_changed(self) -> None:
        """There may be a target now."""
        self._resting.clear()

    def keep(self, short: Set[ShardId]) -> None:
        """Forget what is not short any more."""
        self._failures = {key: count for key, count in self._failures.items() if key[0] in short}
        self._not_before = {key: at for key, at in self._not_before.items() if key[0] in short}
        self._resting = {shard: at for shard, at in self._resting.items() if shard in short}
