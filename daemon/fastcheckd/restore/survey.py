"""Which steps the nodes hold complete, from what they say they hold. Pure.

For a restore without a registry: nobody says which step is committed, so every step counts of which each shard of each
rank has a replica somewhere. Shards make one state only if they come from one attempt of one session at saving it, and
ranks make one step only if they were at work in the same run. Whether the bytes are what their digest says is
found when they are fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastcheck_proto.conventions import RANK_MAX
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb


@dataclass(frozen=True)
class FoundRank:
    """One rank's whole state, somewhere."""

    #: As the registry would record it; each shard's holders are those that say they have it.
    record: rpb.RankRecord
    #: Copies on other nodes than the owner, of the shard that has the fewest.
    copies: int


@dataclass(frozen=True)
class FoundStep:
    """A step that is there for all ranks."""

    step: int
    ranks: tuple[FoundRank, ...]
    #: Some of it was replicated while the registry did not answer.
    provisional: bool

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return len(self.ranks)

    @property
    def replicated(self) -> bool:
        """Whether the ranks saved parts of one state: then any number of ranks may load it."""
        return any(rank.record.HasField("shared") for rank in self.ranks)

    def rank_record(self, job: str, rank: int) -> rpb.StepRecord:
        """The step with one of its ranks, or with all of them if they are parts of one state."""
        found = self.ranks if self.replicated else self.ranks[rank : rank + 1]
        return rpb.StepRecord(
            job=job,
            step=self.step,
            world_size=self.world_size,
            copies=min(each.copies for each in found),
            ranks=[each.record for each in found],
        )

    def summary(self, state: rpb.StepState.ValueType) -> rpb.StepSummary:
        """The step in a list of steps."""
        return rpb.StepSummary(
            step=self.step,
            state=state,
            ranks=self.world_size,
            world_size=self.world_size,
            bytes=sum(rank.record.state_bytes for rank in self.ranks),
            copies=min(rank.copies for rank in self.ranks),
            lossy=any(rank.record.lossy for rank in self.ranks),
            replicated=self.replicated,
        )


class _Run(NamedTuple):
    """What all ranks of a step have in common."""

    generation: int
    world_size: int


class _Attempt(NamedTuple):
    """What all shards of a rank's state have in common."""

    session: int
    save_id: str
    shard_count: int
    state_bytes: int
    owner: str
    #: The part of a shared state that it is, as bytes that compare; empty: none.
    shared: bytes = b""


_Held = tuple[str, peer_pb2.Replica]


def complete_steps(job: str, answers: Mapping[str, Sequence[peer_pb2.Replica]]) -> list[FoundStep]:
    """The job's complete steps, the newest first.

    Args:
        answers: node id → what it says it holds, of this job or of all. Nodes that are missing did not answer.

    Where a step is there from several runs, the one of the latest sessions counts; likewise of several attempts.
    """
    found: dict[tuple[int, _Run], dict[int, dict[_Attempt, list[_Held]]]] = {}
    for node_id, replicas in sorted(answers.items()):
        for replica in replicas:
            key = replica.key
            if key.job != job or not key.rank < replica.world_size <= RANK_MAX:
                continue
            run = _Run(replica.generation, replica.world_size)
            attempt = _Attempt(
                replica.session,
                replica.save_id,
                replica.shard_count,
                replica.state_bytes,
                replica.owner,
                replica.shared.SerializeToString(deterministic=True) if replica.HasField("shared") else b"",
            )
            ranks = found.setdefault((key.step, run), {})
            ranks.setdefault(key.rank, {}).setdefault(attempt, []).append((node_id, replica))
    best: dict[int, FoundStep] = {}
    for (step, run), ranks in sorted(found.items()):  # later runs of a step come later
        if (complete := _complete(step, run, ranks)) is not None:
            best[step] = complete
    return [best[step] for step in sorted(best, reverse=True)]


def _complete(
    step: int, run: _Run, ranks: Mapping[int, Mapping[_Attempt, Sequence[_Held]]]
) -> FoundStep | None:
    if len(ranks) < run.world_size:
        return None
    chosen = []
    provisional = False
    for rank in range(run.world_size):
        whole = [
            (attempt, shards)
            for attempt, held in ranks.get(rank, {}).items()
            if (shards := _shards(attempt, held)) is not None
        ]
        if not whole:
            return None
        # Sessions are numbered; of two attempts of one, the one that more nodes have.
        attempt, shards = max(whole, key=lambda w: (w[0].session, min(map(len, w[1])), w[0].save_id))
        provisional = provisional or any(replica.provisional for held in shards for _, replica in held)
        chosen.append(_rank(rank, attempt, shards))
    if not _one_state([rank.record for rank in chosen]):
        return None
    return FoundStep(step, tuple(chosen), provisional)


def _one_state(records: Sequence[rpb.RankRecord]) -> bool:
    """Whether these are all states of their own, or all parts of one that make a whole."""
    if not any(record.HasField("shared") for record in records):
        return True
    parts = [record.shared for record in records]
    layouts = {(part.shared_bytes, part.layout_digest) for part in parts}
    starts = [0, *(part.stop for part in parts)]
    ends = [*(part.start for part in parts), parts[0].shared_bytes]
    return (
        all(record.HasField("shared") for record in records)
        and len(layouts) == 1
        and starts == ends
        and all(
            part.stop - part.start <= record.state_bytes for part, record in zip(parts, records, strict=True)
        )
    )


def _shards(attempt: _Attempt, held: Iterable[_Held]) -> list[list[_Held]] | None:
    """The holders of each shard in order, if all shards are there and tile the state; of one digest each."""
    by_shard: dict[int, list[_Held]] = {}
    for node_id, replica in held:
        by_shard.setdefault(replica.key.shard, []).append((node_id, replica))
    # The count is what a node says: it is compared before anything is made of it.
    if not by_shard or len(by_shard) != attempt.shard_count or max(by_shard) >= attempt.shard_count:
        return None
    position = 0
    shards = []
    for index in range(attempt.shard_count):
        first = by_shard[index][0][1]
        what = {(r.offset, r.bytes, r.digest) for _, r in by_shard[index]}
        if len(what) != 1 or first.offset != position:
            return None  # they cannot all be right
        position += first.bytes
        shards.append(by_shard[index])
    return shards if position == attempt.state_bytes else None


def _rank(rank: int, attempt: _Attempt, shards: Sequence[Sequence[_Held]]) -> FoundRank:
    record = rpb.RankRecord(
        rank=rank,
        session=attempt.session,
        owner=pb.NodeRef(node_id=attempt.owner),
        state_bytes=attempt.state_bytes,
        lossy=any(replica.lossy for held in shards for _, replica in held),
        shared=pb.SharedPart.FromString(attempt.shared) if attempt.shared else None,
    )
    others = []
    for index, held in enumerate(shards):
        first = held[0][1]
        holders = sorted({node_id for node_id, _ in held})
        others.append(sum(node_id != attempt.owner for node_id in holders))
        record.shards.add(
            shard=index,
            offset=first.offset,
            bytes=first.bytes,
            digest=first.digest,
            holders=[pb.NodeRef(node_id=node_id) for node_id in holders],
        )
    return FoundRank(record, min(others))
