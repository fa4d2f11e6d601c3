"""Defects, one at a time, put into the daemon's own code: a simulation that does not find them proves nothing.

Each takes a promise out of every layer that keeps it, since one layer alone is made good by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

from pysyncobj.transport import TCPTransport
from tests.simulation import voter
from tests.simulation.outward import NetworkOutward

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2, registry_log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.registry import collector, commands, commits, deletion, leader, reports, state
from fastcheckd.registry.model import Job, State, refusal
from fastcheckd.registry.raft import engine, journal, transport
from fastcheckd.store import retention
from fastcheckd.transfer import checks

Command = registry_log_pb2.RegistryCommand
Result = registry_log_pb2.RegistryResult
Patches = list[tuple[Any, str, Any]]


@contextmanager
def _with(patches: Patches) -> Iterator[None]:
    with ExitStack() as stack:
        for where, name, instead in patches:
            if isinstance(where, dict):
                stack.enter_context(mock.patch.dict(where, {name: instead}))
            else:
                stack.enter_context(mock.patch.object(where, name, instead))
        yield


def no_fence() -> Any:
    """Nobody asks whether a session or a life is over: not the leader, not the state machine, not a holder."""

    def anything_goes(*_: object) -> None:
        return None

    return _with(
        [
            (commits, "check_session", anything_goes),
            (reports, "check_session", anything_goes),
            (leader, "check_session", anything_goes),
            (commits, "lost_holders", lambda *_: []),
            (checks, "check_life", anything_goes),
        ]
    )


def commit_without_a_rank() -> Any:
    """A step is committed when all ranks but one are in; the last one's older state has to do."""
    real = commits.commit

    def complete(self: collector.Collection) -> bool:
        return len(self.reports) >= max(1, self.world_size - 1)

    def commit(states: State, command: Command) -> Result:
        kept = command.commit.record
        job = states.jobs.get(kept.job)
        if job is not None and job.steps:
            ranks = {record.rank: record for record in job.steps[-1].ranks}
            for record in ranks.values():
                record.session = job.ranks[record.rank].session
            ranks |= {record.rank: record for record in kept.ranks}
            del kept.ranks[:]
            kept.ranks.extend(ranks[rank] for rank in sorted(ranks))
        return real(states, command)

    return _with(
        [
            (collector.Collection, "complete", property(complete)),
            (state._HANDLERS, "commit", commit),
            (commands._CHECKS, "commit", lambda _: None),
        ]
    )


def owner_as_holder() -> Any:
    """An owner is among the holders of its own shards: two copies in one memory."""
    place = leader.place

    def bad_place(**given: Any) -> Any:
        plan = place(**given)

        def on_owner(shard: Any) -> Any:
            return replace(shard, holders=(given["owner"], *shard.holders[1:]))

        if given["owner"] not in given["members"]:
            return plan
        if hasattr(plan, "shards"):
            return replace(plan, shards=tuple(map(on_owner, plan.shards)))
        return tuple(map(on_owner, plan))

    def check_rank(
        states: State, job: str, step: int, world_size: int, tolerate: int, record: rpb.RankRecord
    ) -> Result | None:
        if fenced := commits.check_session(states, job, record.rank, record.session, record.owner):
            return fenced
        if lost := commits.lost_holders(states, record):
            no = refusal(pb.ERROR_CODE_HOLDER_LOST, "lost", (record.rank,))
            no.lost.extend(ref.message() for ref in lost)
            return no
        return None

    return _with(
        [
            (leader, "place", bad_place),
            (commits, "check_rank", check_rank),
            (reports, "check_rank", check_rank),
            (checks, "check_copy", lambda *_: None),
        ]
    )


def repair_in_words_only() -> Any:
    """A copy counts as made though nobody made it: the record says more than there is."""

    async def replicate(
        self: NetworkOutward,
        node_id: str,
        address: str,
        request: peer_pb2.ReplicateRequest,
        timeout_s: float,
    ) -> peer_pb2.ReplicateResponse:
        return peer_pb2.ReplicateResponse(digest=request.digest)

    return _with([(NetworkOutward, "replicate", replicate)])


def deletion_that_ends_no_session() -> Any:
    """The newest step is deleted, and the processes that made it go on as if it were not."""

    def go_back(job: Job) -> None:
        job.newest = job.steps[-1].step if job.steps else -1
        job.recent = [entry for entry in job.recent if entry[0] <= job.newest]

    return _with([(deletion, "_go_back", go_back)])


def deleted_bytes_stay() -> Any:
    """Nodes hear of a deletion and keep what was deleted."""
    real = retention.Kept.of

    def of(job: rpb.JobView) -> retention.Kept:
        return replace(real(job), void_below_session=0)

    return _with([(retention.Kept, "of", of)])


def superseded_steps_commit() -> Any:
    """A step that was ruled out, and whose bytes may be gone since, is committed all the same."""

    def never(*_: object) -> bool:
        return False

    return _with([(commits, "is_superseded", never)])


def appends_cut_what_matches() -> Any:
    """As pysyncobj has it: an append deletes all that lies behind its beginning, also what the leader counts on."""
    real = engine.Engine._take_entries

    def take(self: engine.Engine, node: Any, message: Any) -> int | None:
        before, first = message["prevLogIdx"], self.journal[0][1]
        behind = first <= before < first + len(self.journal) - 1
        if behind and self.journal[before - first][2] == message["prevLogTerm"]:
            self._cut(before + 1 - first)
        return real(self, node, message)

    return _with([(engine.Engine, "_take_entries", take)])


def leads_on_with_a_full_disk() -> Any:
    """What cannot be written is taken back, and the voter goes on as if nothing were."""

    @contextmanager
    def writing(self: journal.Journal) -> Iterator[None]:
        file = self._disk._files.get(journal.LOG)  # type: ignore[attr-defined]
        size = len(file.data) if file else 0
        try:
            yield
        except OSError:
            if file is not None:
                del file.data[size:]
            raise

    def turn(self: voter.Turns) -> None:
        with suppress(OSError):
            real(self)
        self._voter.poller.dispatched = False

    real = voter.Turns._turn
    return _with([(journal.Journal, "_writing", writing), (voter.Turns, "_turn", turn)])


def acknowledges_before_it_is_on_disk() -> Any:
    """Messages leave a voter when it has written what they speak of, and not when the disk has it."""

    def sync(self: voter.WatchedJournal) -> None:
        return None

    return _with([(voter.WatchedJournal, "sync", sync)])


def connects_anew_in_the_middle_of_a_send() -> Any:
    """As pysyncobj has it: whoever finds a connection dead goes on with the new one as if it were connected."""
    return _with(
        [
            (transport.GuardedTransport, "_onDisconnected", TCPTransport._onDisconnected),
            # Connecting anew soon also ends what this begins.
            (transport, "CONNECT_S", transport.HANDSHAKE_S),
        ]
    )


def loads_void_nothing_of_others() -> Any:
    """A process that loads voids what its own rank has begun, and not what others have."""

    def never(*_: object) -> None:
        return None

    return _with([(reports, "begun_too_early", never)])


PLANTS: dict[str, Callable[[], Any]] = {
    "no_fence": no_fence,
    "commit_without_a_rank": commit_without_a_rank,
    "owner_as_holder": owner_as_holder,
    "repair_in_words_only": repair_in_words_only,
    "deletion_that_ends_no_session": deletion_that_ends_no_session,
    "deleted_bytes_stay": deleted_bytes_stay,
    "superseded_steps_commit": superseded_steps_commit,
    "appends_cut_what_matches": appends_cut_what_matches,
    "leads_on_with_a_full_disk": leads_on_with_a_full_disk,
    "acknowledges_before_it_is_on_disk": acknowledges_before_it_is_on_disk,
    "connects_anew_in_the_middle_of_a_send": connects_anew_in_the_middle_of_a_send,
    "loads_void_nothing_of_others": loads_void_nothing_of_others,
}
