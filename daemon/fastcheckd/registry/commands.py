"""Commands: what each must be, checked before anything changes, and how those are made that are no request. Pure.

Commands come from a leader that checked them already, by the same functions. A voter must stay standing whatever the
log holds, so it checks them again. Nothing here asks the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX, check_name
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import node_pb2
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import LABELS_MAX, Voter
from ..digests import DIGEST_BYTES
from .model import DOWN, DRAINING, IDENTITY_BYTES_MAX, UP, AnyRef, MalformedError, NodeState, Ref
from .raft.membership import voter_message

ADDRESS_BYTES_MAX = 300
#: Random identifiers that others make: client ids, life ids.
TOKEN_BYTES_MAX = 128
SHARDS_MAX = 64
#: Of a state that all ranks hold alike.
LAYOUT_DIGEST_BYTES = 16
HOLDERS_MAX = 16
KEEP_STEPS_MAX = 1000
#: Why a node is in its state, in words for people.
REASON_BYTES_MAX = 200
#: Config allows 5; while one is being replaced there may be one more or one fewer.
VOTERS_MAX = 9
#: Changes of holders in one command: some milliseconds of every voter's time. And replicas that are marked.
CHANGES_MAX = 256
MARKED_MAX = 1000
SESSION_MAX = (1 << 63) - 1


def noop() -> log_pb2.RegistryCommand:
    """Changes nothing; that it is committed proves that its proposer leads."""
    return log_pb2.RegistryCommand(noop=log_pb2.NoChange())


def set_state(node: AnyRef, state: NodeState, reason: str, *, at_ms: int = 0) -> log_pb2.RegistryCommand:
    """UP, DRAINING or DOWN. The reason may be any text; what does not fit is left out."""
    plain = "".join(c if c.isascii() and c.isprintable() else "?" for c in reason)
    change = log_pb2.NodeStateChange(
        node=Ref.of(node).message(), state=state, reason=plain[:REASON_BYTES_MAX]
    )
    return log_pb2.RegistryCommand(set_state=change, at_ms=at_ms)


def set_voters(voters: Iterable[Voter], *, at_ms: int = 0) -> log_pb2.RegistryCommand:
    """Name the voters that everyone goes by."""
    named = log_pb2.VoterList(voters=map(voter_message, voters))
    return log_pb2.RegistryCommand(set_voters=named, at_ms=at_ms)


def rehold(changes: Iterable[log_pb2.HolderChange]) -> log_pb2.RegistryCommand:
    """Committed shards have other holders: at most `CHANGES_MAX` changes."""
    return log_pb2.RegistryCommand(rehold=log_pb2.HolderChanges(changes=changes))


def check(command: log_pb2.RegistryCommand) -> None:
    """Raise MalformedError for a command that nobody following the rules would send."""
    kind = command.WhichOneof("kind")
    if kind is None:
        raise MalformedError("unknown command")
    _number("at_ms", command.at_ms, STEP_MAX)
    if kind in _CHECKS:
        _CHECKS[kind](command)


def check_of(what: str, name: str) -> None:
    """Raise MalformedError for what is no name of a job, a node or a label."""
    try:
        check_name(what, name)
    except ValueError as error:
        raise MalformedError(str(error)) from None


def check_text(what: str, value: str, bytes_max: int, *, empty: bool = False) -> None:
    """Raise MalformedError for what is not printable ASCII of bounded length."""
    if not value.isascii() or not (value.isprintable() or not value):
        raise MalformedError(f"{what} must be printable ASCII text")
    if len(value) > bytes_max or not (value or empty):
        raise MalformedError(f"{what} must have 1 to {bytes_max} characters")


def check_rank(job: str, rank: int, world_size: int) -> None:
    """Raise MalformedError for a rank that no job has."""
    check_of("job", job)
    if not 1 <= world_size <= RANK_MAX or rank >= world_size:
        raise MalformedError(f"rank {rank} and world size {world_size} do not fit, or are beyond {RANK_MAX}")


def check_step(step: int) -> None:
    """Raise MalformedError for a number that no step has."""
    _number("step", step, STEP_MAX)


def check_ref(ref: pb.NodeRef) -> None:
    """Raise MalformedError for what is no node in one of its lives."""
    check_of("node", ref.node_id)
    _number("incarnation", ref.incarnation, STEP_MAX)


def check_rank_record(record: rpb.RankRecord) -> None:
    """Raise MalformedError unless the shards tile [0, state_bytes), in order, and all else is within its bounds."""
    rank, size = record.rank, record.state_bytes
    if not 1 <= len(record.shards) <= SHARDS_MAX:
        raise MalformedError(f"a rank's record must have 1 to {SHARDS_MAX} shards")
    _number("rank", rank, RANK_MAX - 1)
    _number("session", record.session, STEP_MAX)
    _number("state_bytes", size, STEP_MAX)
    check_ref(record.owner)
    at = 0
    for index, shard in enumerate(record.shards):
        if shard.shard != index:
            raise MalformedError("the shards of a record must be numbered from 0, each once and in order")
        if shard.offset != at or (shard.bytes == 0 and size > 0):
            raise MalformedError(f"the shards of rank {rank} do not tile its state")
        at += shard.bytes
        _digest(shard.digest)
        if len(shard.holders) > HOLDERS_MAX or shard.lost:
            raise MalformedError(f"a shard must have at most {HOLDERS_MAX} holders, and none that lost it")
        for holder in shard.holders:
            check_ref(holder)
    if at != size:
        raise MalformedError(f"the shards of rank {rank} do not tile its state")
    if record.HasField("shared"):
        check_shared_part(record.shared, size)


def check_shared_part(part: pb.SharedPart, state_bytes: int) -> None:
    """Raise MalformedError unless the part lies in its state, and its bytes in the rank's."""
    if len(part.layout_digest) != LAYOUT_DIGEST_BYTES:
        raise MalformedError(f"a layout's digest must be {LAYOUT_DIGEST_BYTES} bytes")
    _number("shared_bytes", part.shared_bytes, STEP_MAX)
    if not part.start <= part.stop <= part.shared_bytes or part.stop - part.start > state_bytes:
        raise MalformedError("a shared part must lie in its state, and its bytes in the rank's")


def is_lossy(ranks: Iterable[rpb.RankRecord]) -> bool:
    """Whether the record of at least one rank says that its state is the outcome of a lossy coding."""
    return any(rank.lossy for rank in ranks)


def _number(what: str, value: int, most: int) -> None:
    if value > most:
        raise MalformedError(f"{what} must be a whole number from 0 to {most}")


def _digest(digest: bytes) -> None:
    if len(digest) != DIGEST_BYTES:
        raise MalformedError(f"a shard's digest must be {DIGEST_BYTES} bytes")


def _key(key: pb.ShardKey) -> None:
    check_of("job", key.job)
    check_step(key.step)
    _number("rank", key.rank, RANK_MAX - 1)
    _number("shard", key.shard, SHARDS_MAX - 1)


def _register(command: log_pb2.RegistryCommand) -> None:
    said = command.register
    check_of("node", said.node_id)
    for what, address in (
        ("agent_address", said.agent_address),
        ("data_address", said.data_address),
        ("lane_address", said.lane_address),
    ):
        check_text(what, address, ADDRESS_BYTES_MAX)
    check_text("life_id", said.life_id, TOKEN_BYTES_MAX)
    _number("ram_budget_bytes", said.ram_budget_bytes, STEP_MAX)
    if len(said.labels) > LABELS_MAX:
        raise MalformedError(f"labels must be pairs of a name and a value, at most {LABELS_MAX}")
    for label in sorted(said.labels):
        check_of("label", label)
        check_of(label, said.labels[label])


def _set_state(command: log_pb2.RegistryCommand) -> None:
    check_ref(command.set_state.node)
    if command.set_state.state not in (UP, DRAINING, DOWN):
        raise MalformedError("a node's state can be set to UP, DRAINING or DOWN")
    check_text("reason", command.set_state.reason, REASON_BYTES_MAX, empty=True)


def _set_voters(command: log_pb2.RegistryCommand) -> None:
    voters = command.set_voters.voters
    if not 1 <= len(voters) <= VOTERS_MAX:
        raise MalformedError(f"the voters must be a list of 1 to {VOTERS_MAX}")
    for voter in voters:
        check_of("node", voter.node_id)
        check_text("registry_address", voter.registry_address, ADDRESS_BYTES_MAX)
        check_text("raft_address", voter.raft_address, ADDRESS_BYTES_MAX)
    columns: tuple[tuple[str, Callable[[node_pb2.VoterRecord], str]], ...] = (
        ("nodes", lambda voter: voter.node_id),
        ("registry addresses", lambda voter: voter.registry_address),
        ("raft addresses", lambda voter: voter.raft_address),
    )
    for what, column in columns:
        if len(set(map(column, voters))) != len(voters):
            raise MalformedError(f"the voters must have different {what}")


def _open_rank(command: log_pb2.RegistryCommand) -> None:
    asked = command.open_rank
    check_rank(asked.job, asked.rank, asked.world_size)
    check_text("client_id", asked.client_id, TOKEN_BYTES_MAX)
    check_ref(asked.node)
    check_text("identity", asked.identity, IDENTITY_BYTES_MAX, empty=True)
    _number("replaces", asked.replaces, SESSION_MAX)
    _number("renews", asked.renews, SESSION_MAX)


def _commit(command: log_pb2.RegistryCommand) -> None:
    record, tolerate, keep = command.commit.record, command.commit.tolerate, command.commit.keep_steps
    check_of("job", record.job)
    check_step(record.step)
    if not 1 <= record.world_size <= RANK_MAX or len(record.ranks) != record.world_size:
        raise MalformedError(f"a commit must have the records of exactly {record.world_size} ranks")
    if not 1 <= tolerate <= HOLDERS_MAX or not 1 <= keep <= KEEP_STEPS_MAX:
        raise MalformedError(f"a commit cannot tolerate {tolerate} losses or keep {keep} steps")
    for index, rank in enumerate(record.ranks):
        if rank.rank != index:
            raise MalformedError(
                f"the ranks of a commit must be 0 to {record.world_size - 1}, each once, in order"
            )
        check_rank_record(rank)


def _rehold(command: log_pb2.RegistryCommand) -> None:
    if len(command.rehold.changes) > CHANGES_MAX:
        raise MalformedError(f"changes must be a list of at most {CHANGES_MAX}")
    for change in command.rehold.changes:
        _key(change.key)
        _digest(change.digest)
        adds, removes = change.HasField("add"), change.HasField("remove")
        if adds:
            check_ref(change.add)
        if removes:
            check_ref(change.remove)
        if len(change.absent) > SHARDS_MAX or any(shard >= SHARDS_MAX for shard in change.absent):
            raise MalformedError("absent must be a list of shards")
        if not adds and not removes:
            raise MalformedError("a change of holders must add or remove one")
        if change.of_owner and (not adds or removes):
            raise MalformedError("an owner is replaced by its own node in a later life, nothing else")
        if change.absent and not change.of_owner:
            raise MalformedError("only an owner may lack some of its shards")
        if adds and removes and change.add.node_id == change.remove.node_id:
            raise MalformedError("a node that comes back is added; its earlier life goes by itself")


def _mark(command: log_pb2.RegistryCommand) -> None:
    for replicas in (command.mark.lost, command.mark.held):
        if len(replicas) > MARKED_MAX:
            raise MalformedError(f"at most {MARKED_MAX} replicas are marked at once")
        for replica in replicas:
            _key(replica.key)
            check_ref(replica.node)


def _supersede(command: log_pb2.RegistryCommand) -> None:
    asked = command.supersede
    check_of("job", asked.job)
    _number("rank", asked.rank, RANK_MAX - 1)
    _number("session", asked.session, STEP_MAX)
    check_step(asked.below_step)
    check_ref(asked.owner)


def _delete(command: log_pb2.RegistryCommand) -> None:
    check_of("job", command.delete.job)
    check_step(command.delete.step)


def _close_rank(command: log_pb2.RegistryCommand) -> None:
    asked = command.close_rank
    check_of("job", asked.job)
    _number("rank", asked.rank, RANK_MAX - 1)
    _number("session", asked.session, STEP_MAX)


_CHECKS: dict[str, Callable[[log_pb2.RegistryCommand], None]] = {
    "register": _register,
    "set_state": _set_state,
    "set_draining": lambda command: check_of("node", command.set_draining.node_id),
    "forget": lambda command: check_of("node", command.forget.node_id),
    "set_voters": _set_voters,
    "open_rank": _open_rank,
    "commit": _commit,
    "rehold": _rehold,
    "mark": _mark,
    "supersede": _supersede,
    "delete": _delete,
    "close_rank": _close_rank,
}
