"""What must hold, whoever is asked: the simulation's own books, and the checks against them.

Written from the promises in docs/concepts.md, not from the code that keeps them. The first thing that does not
hold ends the run. Everything that happens goes through `note` into a bounded trace, and all of it into a hash
by which two runs of a seed are compared.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.registry.model import DOWN, Ref, State, live, state_name

Command = registry_log_pb2.RegistryCommand
Result = registry_log_pb2.RegistryResult

#: Kind, job, step, rank, shard.
Key = tuple[int, str, int, int, int]

OWNER = int(pb.REPLICA_KIND_OWNER)
COPY = int(pb.REPLICA_KIND_COPY)
TRACE_MAX = 400
#: Queues that are larger than this are not bounded.
QUEUE_MAX = 2000


@dataclass
class Replica:
    """Bytes in a node's RAM."""

    digest: bytes
    session: int
    intact: bool = True
    #: Read since this data process is here: it is believed without another look.
    checked: bool = True


@dataclass
class Ram:
    """A node's memory; its machine's losses are the fault injector's doing alone."""

    replicas: dict[Key, Replica] = field(default_factory=dict)


class Truth:
    """All that is known of one run."""

    def __init__(self, clock: Callable[[], float], stop: Callable[[], None], tolerate: int) -> None:
        self._clock = clock
        self._stop = stop
        self._tolerate = tolerate
        self.violation: str | None = None
        self.trace: deque[str] = deque(maxlen=TRACE_MAX)
        self._hash = hashlib.blake2b(digest_size=16)
        self.rams: dict[str, Ram] = {}
        #: The state after the newest entry that any voter has applied, and each entry's identity.
        self.state = State()
        self._entries: list[tuple[object, ...]] = []
        #: Digests of what each rank made: (job, step, rank, session) -> shards.
        self.made: dict[tuple[str, int, int, int], list[bytes]] = {}
        #: When its trainer began each of these saves; when the newest process of each job that loads took its place.
        self.begun: dict[tuple[str, int, int, int], float] = {}
        self.newest_load: dict[str, float] = {}
        #: Committed steps: (job, step) -> rank -> (session, digests); and the newest of each job.
        self.committed: dict[tuple[str, int], dict[int, tuple[int, list[bytes]]]] = {}
        self.newest: dict[str, int] = {}
        #: What of them is kept, oldest first; how many commits and deletions of each job there were.
        self.kept: dict[str, list[int]] = {}
        self.commits_of: Counter[str] = Counter()
        self.deletions: Counter[str] = Counter()
        #: Every save that was ever committed, and those that were deleted: (job, step, rank, session).
        self.ever: set[tuple[str, int, int, int]] = set()
        self.deleted: set[tuple[str, int, int, int]] = set()
        #: Newest session of each job, and the newest one that a deletion has ended.
        self.opened: Counter[str] = Counter()
        self.over: Counter[str] = Counter()
        #: Newest step that somebody was told of.
        self.told: dict[str, int] = {}
        self._applied_newest: dict[tuple[str, str], tuple[int, int]] = {}
        self._decisions: set[tuple[object, ...]] = set()
        #: Lives that are over, and why.
        self.ended: dict[tuple[str, int], str] = {}
        self.commits = self.loads = self.lookups = self.puts = self.repairs = 0

    @property
    def digest(self) -> str:
        """A hash of everything noted so far."""
        return self._hash.hexdigest()

    def note(self, what: str) -> None:
        line = f"{self._clock():9.4f} {what}"
        self.trace.append(line)
        self._hash.update(line.encode())

    def check(self, ok: bool, guarantee: str, what: str) -> None:
        if not ok and self.violation is None:
            self.violation = f"{guarantee}: {what}"
            self.note(f"VIOLATION {self.violation}")
            self._stop()

    # The registry

    def applied(self, voter: str, index: int, command: Command, result: Result, state: State) -> None:
        """A voter, in one of its lives, has applied an entry."""
        kind = str(command.WhichOneof("kind"))
        identity = (kind, command.proposer, command.seq)
        if index <= len(self._entries):
            self.check(self._entries[index - 1] == identity, "raft", f"{voter} applied another entry {index}")
        else:
            while len(self._entries) < index - 1:
                self._entries.append(())  # the engine's own
            self._entries.append(identity)
            self.state = state
            if kind == "noop" or identity not in self._decisions:
                self._decisions.add(identity)
                self._decided(command, result, state)
        if kind in ("commit", "open_rank", "delete"):
            job = _job_of(command)
            known = state.jobs.get(job)
            # Only a deletion takes it back.
            newest = (0, -1) if known is None else (known.void, known.newest)
            before = self._applied_newest.get((voter, job), (0, -1))
            self.check(newest >= before, "G3", f"{voter}: job {job} went back from {before} to {newest}")
            self._applied_newest[(voter, job)] = newest

    def _decided(self, command: Command, result: Result, state: State) -> None:
        kind = str(command.WhichOneof("kind"))
        if kind == "commit":
            job, step = command.commit.record.job, command.commit.record.step
            if result.ok and step not in self.kept.get(job, []):
                self._commit(command, state)
            elif not result.ok:
                self.note(f"commit {job}/{step} refused: {pb.ErrorCode.Name(result.code)}")
        elif kind == "set_state":
            node, incarnation = Ref.of(command.set_state.node)
            reason, wanted = command.set_state.reason, command.set_state.state
            if wanted == DOWN and result.ok:
                self.ended.setdefault((node, incarnation), reason)
            self.note(f"{node}#{incarnation} {state_name(wanted)}: {result.ok}, {reason}")
        elif kind == "register":
            self.note(f"{command.register.node_id} registers: #{result.incarnation}")
        elif kind == "rehold":
            made = sum(not why for why in result.why)
            self.note(f"rehold {made} of {len(command.rehold.changes)}")
            self.check_survival("a change of holders")
        elif kind == "delete" and result.ok:
            self._delete(command, result, state)
        elif kind != "noop":
            job = _job_of(command)
            if kind == "open_rank" and result.ok:
                self.opened[job] = max(self.opened[job], result.session)
                if state.jobs[job].newest_load == (result.session, command.open_rank.rank):
                    self.newest_load[job] = self._clock()
            self.note(f"{kind} {job}: {result.ok}")

    def _commit(self, command: Command, state: State) -> None:
        kept = command.commit.record
        job, step, ranks, world = kept.job, kept.step, kept.ranks, kept.world_size
        newest = self.newest.get(job, -1)
        self.check(step > newest, "G3", f"step {step} of {job} committed after {newest}")
        seats = state.jobs[job].ranks
        self.check(
            sorted(r.rank for r in ranks) == list(range(world)), "G2", f"{job}/{step} without all ranks"
        )
        for record in ranks:
            rank, session = record.rank, record.session
            who = f"{job}/{step} rank {rank}"
            self.check(session > self.over[job], "deletion", f"{who} committed for ended session {session}")
            self.check(seats[rank].session == session, "G7", f"{who} committed for dead session {session}")
            self.check(seats[rank].world_size == world, "G2", f"{who} committed for another world")
            begun, loads = self.begun[(job, step, rank, session)], self.newest_load.get(job, 0.0)
            self.check(begun >= loads, "G2", f"{who} began its save before a rank loaded, and committed it")
            made = self.made.get((job, step, rank, session))
            digests = [shard.digest for shard in record.shards]
            self.check(
                made == digests, "G2", f"{who} committed with other bytes than were saved for this step"
            )
            owner, incarnation = Ref.of(record.owner)
            self.check(live(state, record.owner), "G7", f"{who} of dead owner {owner}#{incarnation}")
            for shard in record.shards:
                names = [holder.node_id for holder in shard.holders]
                self.check(
                    len({*names, owner}) > max(len(names), self._tolerate),
                    "G1",
                    f"{who}: {names} and its owner {owner} are too few nodes",
                )
                for holder in shard.holders:
                    what = f"{holder.node_id}#{holder.incarnation}"
                    self.check(live(state, holder), "G7", f"{who} names dead holder {what}")
        self.commits += 1
        self.newest[job] = step
        self.committed[(job, step)] = {r.rank: (r.session, [s.digest for s in r.shards]) for r in ranks}
        self.commits_of[job] += 1
        self.ever |= {(job, step, r.rank, r.session) for r in ranks}
        self.kept[job] = [*self.kept.get(job, []), step][-command.commit.keep_steps :]
        self.note(f"commit {job}/{step}")
        self.check_kept(job, state)
        self.check_survival(f"commit of {job}/{step}")

    def _delete(self, command: Command, result: Result, state: State) -> None:
        asked = command.delete
        job, step = asked.job, asked.step if asked.HasField("step") else None
        kept = self.kept.get(job, [])
        going = list(kept) if step is None else [step] if step in kept else []
        self.check(
            list(result.deleted) == going,
            "deletion",
            f"of {job} {list(result.deleted)} went, not {going}, though {step} was asked for",
        )
        for gone in going:
            saves = self.committed[(job, gone)].items()
            self.deleted |= {(job, gone, rank, session) for rank, (session, _) in saves}
        left = [each for each in kept if each not in going]
        if step is None or (going and kept[-1] == step):
            self.over[job] = self.opened[job]
        self.kept[job] = left
        self.newest.pop(job, None)
        if left:
            self.newest[job] = left[-1]
        self.told[job] = -1
        self.deletions[job] += 1
        self.note(f"delete {job}/{'all' if step is None else step}: {going} goes, {left} is left")
        self.check_kept(job, state)
        self.check_survival(f"deletion of {job}/{step}")

    def check_kept(self, job: str, state: State) -> None:
        """Nothing that was deleted is back, and nothing that was not is gone."""
        steps = [kept.step for kept in state.steps_of(job)]
        self.check(steps == self.kept[job], "deletion", f"{job} keeps {steps}, not {self.kept[job]}")

    def unwanted(self, name: str) -> Key | None:
        """A replica in a node's memory that nothing will ask for, since its session was ended by a deletion."""
        for key, replica in self.rams[name].replicas.items():
            _, job, step, _, _ = key
            if replica.session <= self.over[job] and step not in self.kept.get(job, []):
                return key
        return None

    def claims(self) -> Iterator[tuple[str, int, int, int, int, list[tuple[str, int]]]]:
        """What the registry says of each shard of each kept step: job, step, rank, shard, wanted copies, and the lives
        that it holds to have one. A deletion makes an older step the newest.
        """
        for job_name, job in self.state.jobs.items():
            for kept in job.steps:
                for record in kept.ranks:
                    for number, shard in enumerate(record.shards):
                        lost = set(map(Ref.of, shard.lost))
                        refs = [*map(Ref.of, shard.holders), Ref.of(record.owner)]
                        shard_id = (job_name, kept.step, record.rank, number)
                        there = [(*ref,) for ref in refs if live(self.state, ref) and ref not in lost]
                        yield *shard_id, self._tolerate + 1, there

    # Memory

    def took(self, node: str, incarnation: int, addressed: int) -> None:
        """A node has become a holder of a shard that was meant for one of its lives."""
        self.check(addressed == incarnation, "G7", f"{node}#{incarnation} took a copy for #{addressed}")
        reason = self.ended.get((node, incarnation))
        self.check(
            reason in (None, "left"), "G7", f"{node}#{incarnation} took a copy though it is DOWN: {reason}"
        )

    def check_survival(self, after: str) -> None:
        """G1: every shard of every kept step is intact somewhere."""
        for job, step in ((job, step) for job, steps in self.kept.items() for step in steps):
            for rank, (_, digests) in self.committed[(job, step)].items():
                for shard, digest in enumerate(digests):
                    if not self.holders(job, step, rank, shard, digest):
                        self.check(
                            False, "G1", f"{job}/{step} rank {rank} shard {shard} is lost after {after}"
                        )
                        return

    def holders(self, job: str, step: int, rank: int, shard: int, digest: bytes) -> list[str]:
        """Nodes with an intact copy."""
        keys = ((OWNER, job, step, rank, shard), (COPY, job, step, rank, shard))
        found = []
        for name, ram in self.rams.items():
            for key in keys:
                replica = ram.replicas.get(key)
                if replica is not None and replica.intact and replica.digest == digest:
                    found.append(name)
                    break
        return found

    # Clients

    def floor(self, job: str) -> tuple[int, int]:
        """How often steps of a job were deleted, and the newest step that anybody has been told of since."""
        return self.deletions[job], self.told.get(job, -1)

    def answered(self, job: str, began: tuple[int, int], response: rpb.LookupResponse) -> None:
        """A lookup that began when `began` was the `floor`."""
        self.lookups += 1
        deletions, floor = began
        if deletions != self.deletions[job]:
            return  # it may have been answered before the deletion or after it
        if not response.HasField("record"):
            self.check(floor < 0, "G3", f"lookup of {job} found nothing after {floor}")
            return
        step = response.record.step
        self.check(step >= floor, "G3", f"lookup of {job} said {step} after {floor}")
        committed = self.committed.get((job, step))
        self.check(committed is not None, "G3", f"lookup of {job} said {step}, which is not committed")
        for record in response.record.ranks if committed else ():
            assert committed is not None
            self.check(
                committed[record.rank][1] == [s.digest for s in record.shards],
                "G2",
                f"lookup of {job}/{step} rank {record.rank}: other digests than were committed",
            )
            self.check(
                (job, step, record.rank, record.session) not in self.deleted,
                "deletion",
                f"lookup of {job} said {step}, which was deleted before it began",
            )
        self.told[job] = max(self.told.get(job, -1), step)

    def told_committed(self, job: str, step: int, rank: int, session: int) -> None:
        """A rank's save was answered with COMMITTED."""
        self.check(
            (job, step, rank, session) in self.ever,
            "G2",
            f"rank {rank} was told that {job}/{step} of session {session} is committed; it is not",
        )
        if (job, step, rank, session) not in self.deleted:
            self.told[job] = max(self.told.get(job, -1), step)


def _job_of(command: Command) -> str:
    """The job that a command is about; empty: none."""
    kind = str(command.WhichOneof("kind"))
    said = command.commit.record if kind == "commit" else getattr(command, kind)
    return str(getattr(said, "job", ""))
