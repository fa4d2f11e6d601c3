"""How many copies of the committed steps are left, what is short of them, what a node's stop would cost. Pure.

A copy counts when its node is UP in the life that the record names and is not DRAINING, and the replica is not LOST.
The owner's own bytes are a copy like the others. Nothing here reads more than the state and what its caller passes;
`repairs` acts on it.

Tens of thousands of shards are looked at after every change, so the pass over them is written for speed: nearly all
are in good order, and those cost a few look-ups each and make no object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from fastcheck_proto.placement_groups import domain_of
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from .loads import domain_label
from .model import UP, Ref, ShardId, State, is_live

REASONS_MAX = 16
#: Jobs that an answer names.
JOBS_SHOWN_MAX = 64


class RecordedReplica(NamedTuple):
    """A replica of a shard on a node in one of its lives, as a record names it: the owner's own or a holder's."""

    shard: ShardId
    ref: Ref

    @classmethod
    def of(cls, message: log_pb2.RecordedShard) -> RecordedReplica:
        """As a key."""
        return cls(ShardId.of(message.key), Ref.of(message.node))

    def message(self) -> log_pb2.RecordedShard:
        """As commands have it."""
        return log_pb2.RecordedShard(key=self.shard.message(), node=self.ref.message())


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A shard with fewer counting copies than wanted, or with copies in one failure domain for no need."""

    id: ShardId
    digest: bytes
    bytes: int
    #: The owner's node, in whichever life: it never takes a copy of its own shard.
    owner: str
    #: Counting copies; the owner's, if it counts, is the first.
    live: tuple[Ref, ...]
    #: On nodes that are DRAINING: they can be read and do not count.
    draining: tuple[Ref, ...]
    #: Of lives that are over, the owner's among them.
    dead: tuple[Ref, ...]
    #: Of nodes that live, and no longer have the bytes.
    lost: tuple[Ref, ...]
    #: Copies to be made; 0 when only the domains are short.
    missing: int
    domains_short: bool

    @property
    def readable(self) -> bool:
        """Whether there is anything to copy from."""
        return bool(self.live or self.draining)


@dataclass(frozen=True)
class Survey:
    """The whole state, looked at once."""

    #: The newest step of each job first, then the fewest copies.
    shortages: tuple[Shortage, ...] = ()
    short_bytes: int = 0
    #: Shards without any copy that can be read.
    lost_shards: int = 0
    domains_short_shards: int = 0
    #: Bytes of committed steps that each node holds, as far as the registry knows.
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Lives that are over and are still named somewhere.
    dead: frozenset[Ref] = frozenset()

    @property
    def short_shards(self) -> int:
        """Shards that miss a copy, those without any included."""
        return sum(1 for shortage in self.shortages if shortage.missing)


def counts(node: rpb.NodeRecord) -> bool:
    """Whether copies on a node (in its present life) count: it is UP and is to stay."""
    return node.state == UP and not node.draining


def kept_shards(state: State) -> Iterator[tuple[ShardId, rpb.RankRecord, rpb.ShardRecord]]:
    """Every shard of every kept committed step, with its rank's record and its own; a job's newest step first."""
    for job_name, job in state.jobs.items():
        for kept in reversed(job.steps):
            for record in kept.ranks:
                for index, shard in enumerate(record.shards):
                    yield ShardId(job_name, kept.step, record.rank, index), record, shard


def find_shard(state: State, wanted: ShardId) -> tuple[rpb.RankRecord, rpb.ShardRecord] | None:
    """A kept shard's rank record and its own record."""
    for kept in state.steps_of(wanted.job):
        if kept.step == wanted.step and wanted.rank < len(kept.ranks):
            record = kept.ranks[wanted.rank]
            if wanted.shard < len(record.shards):
                return record, record.shards[wanted.shard]
    return None


def replicas_of(record: rpb.RankRecord, shard: rpb.ShardRecord) -> list[Ref]:
    """The replicas that a shard's record names, the owner's first."""
    return [Ref.of(record.owner), *map(Ref.of, shard.holders)]


def is_lost(state: State, replica: RecordedReplica) -> bool | None:
    """Whether a replica is LOST; None: no record names it, or the node is in another life."""
    node = state.nodes.get(replica.ref.node_id)
    if node is None or node.incarnation != replica.ref.incarnation:
        return None
    found = find_shard(state, replica.shard)
    if found is None or replica.ref not in replicas_of(*found):
        return None
    return replica.ref in map(Ref.of, found[1].lost)


def survey(state: State, *, tolerate: int, domain_key: str = "") -> Survey:
    """Look at every shard of every kept committed step.

    Args:
        tolerate: copies wanted beside the first one.
        domain_key: label whose values fail together; empty: every node by itself.
    """
    nodes = state.nodes
    counting = {node_id: node.incarnation for node_id, node in nodes.items() if counts(node)}
    live = {node_id: node.incarnation for node_id, node in nodes.items() if is_live(node)}
    domains = {node_id: domain_of(node_id, domain_label(nodes[node_id], domain_key)) for node_id in counting}
    wanted = tolerate + 1
    watch_domains = bool(domain_key) and len(set(domains.values())) >= wanted
    held = dict.fromkeys(live, 0)
    dead: set[Ref] = set()
    found: list[tuple[int, Shortage]] = []
    for job_name, job in state.jobs.items():
        for age, kept in enumerate(reversed(job.steps)):
            for record in kept.ranks:
                owner = record.owner
                for index, shard in enumerate(record.shards):
                    good = 0
                    size = shard.bytes
                    spread_over = set()
                    for ref in (owner, *shard.holders):
                        node_id, incarnation = ref.node_id, ref.incarnation
                        if live.get(node_id) == incarnation:
                            held[node_id] += size
                            if node_id in counting:
                                good += 1
                                if watch_domains:
                                    spread_over.add(domains[node_id])
                        else:
                            dead.add(Ref(node_id, incarnation))
                    if (
                        good >= wanted
                        and (not watch_domains or len(spread_over) >= wanted)
                        and not shard.lost
                    ):
                        continue
                    shard_id = ShardId(job_name, kept.step, record.rank, index)
                    shortage = _shortage(
                        shard_id, record, shard, live, counting, domains, wanted, watch_domains
                    )
                    if shortage is not None:
                        found.append((age, shortage))
    found.sort(key=lambda entry: (not entry[1].missing, entry[0], len(entry[1].live), entry[1].id))
    shortages = tuple(shortage for _, shortage in found)
    return Survey(
        shortages=shortages,
        short_bytes=sum(shortage.missing * shortage.bytes for shortage in shortages),
        lost_shards=sum(1 for shortage in shortages if not shortage.readable),
        domains_short_shards=sum(1 for shortage in shortages if shortage.domains_short),
        held_bytes=held,
        dead=frozenset(dead),
    )


def _shortage(
    shard_id: ShardId,
    record: rpb.RankRecord,
    shard: rpb.ShardRecord,
    live: Mapping[str, int],
    counting: Mapping[str, int],
    domains: Mapping[str, tuple[str, str]],
    wanted: int,
    watch_domains: bool,
) -> Shortage | None:
    """What a shard is short of, exactly; None: of nothing."""
    good: dict[str, Ref] = {}
    draining: list[Ref] = []
    dead: list[Ref] = []
    lost: list[Ref] = []
    marked = set(map(Ref.of, shard.lost))
    for ref in replicas_of(record, shard):
        if live.get(ref.node_id) != ref.incarnation:
            dead.append(ref)
        elif ref in marked:
            lost.append(ref)
        elif ref.node_id in counting:
            good.setdefault(ref.node_id, ref)
        else:
            draining.append(ref)
    missing = max(0, wanted - len(good))
    spread_over = len({domains[node_id] for node_id in good})
    domains_short = watch_domains and spread_over < min(len(good), wanted)
    if not missing and not domains_short:
        return None
    return Shortage(
        id=shard_id,
        digest=shard.digest,
        bytes=shard.bytes,
        owner=record.owner.node_id,
        live=tuple(good.values()),
        draining=tuple(draining),
        dead=tuple(dead),
        lost=tuple(lost),
        missing=missing,
        domains_short=domains_short,
    )


@dataclass(frozen=True, kw_only=True)
class StopVerdict:
    """What stopping a node for good would cost."""

    #: Every committed shard keeps the wanted copies elsewhere, and the registry its quorum.
    safe: bool
    #: Nothing committed would be lost, nor the quorum.
    survivable: bool
    #: Why it is not safe, a sentence each.
    reasons: tuple[str, ...]
    short_shards: int
    lost_shards: int
    #: Jobs with such shards.
    jobs: tuple[str, ...]


def stop_verdict(
    state: State,
    node_id: str,
    *,
    tolerate: int,
    voters: Collection[str],
    unwell: Set[str] = frozenset(),
) -> StopVerdict:
    """Judge a node that is to be stopped.

    Args:
        voters: node ids of all voters.
        unwell: nodes that may be dead already; what they hold counts for nothing.
    """
    others = {other: node for other, node in state.nodes.items() if other != node_id and other not in unwell}
    counting = {other: node.incarnation for other, node in others.items() if counts(node)}
    live = {other: node.incarnation for other, node in others.items() if is_live(node)}
    short: dict[str, int] = {}
    gone: dict[str, int] = {}
    for shard_id, record, shard in kept_shards(state):
        good, readable = set(), False
        lost = set(map(Ref.of, shard.lost))
        for ref in replicas_of(record, shard):
            if live.get(ref.node_id) != ref.incarnation or ref in lost:
                continue
            readable = True
            if ref.node_id in counting:
                good.add(ref.node_id)
        if len(good) <= tolerate:
            short[shard_id.job] = short.get(shard_id.job, 0) + 1
            if not readable:
                gone[shard_id.job] = gone.get(shard_id.job, 0) + 1
    reasons = [
        f"job {job}: {_shards(count)} would have no copy left on another node" for job, count in gone.items()
    ]
    reasons += [
        f"job {job}: {_shards(count)} would have fewer than {tolerate + 1} copies on nodes that stay"
        for job, count in short.items()
    ]
    standing = {voter for voter in voters if voter in live}
    quorum = not voters or 2 * len(standing) > len(voters)
    if not quorum:
        reasons.insert(
            0,
            f"the registry would have {len(standing)} of its {len(voters)} voters, "
            f"{len(voters) // 2 + 1} are needed: start others, or replace {node_id} as a voter first",
        )
    return StopVerdict(
        safe=quorum and not short,
        survivable=quorum and not gone,
        reasons=tuple(reasons[:REASONS_MAX]),
        short_shards=sum(short.values()),
        lost_shards=sum(gone.values()),
        jobs=tuple(sorted(short)[:JOBS_SHOWN_MAX]),
    )


def _shards(count: int) -> str:
    return "one shard" if count == 1 else f"{count} shards"
