"""The replicated state in a voter's memory: its fields, and what they promise. Pure.

Containers are Python's, so that order is kept and what is dropped is freed; what they hold are messages, the same that
snapshots and calls carry. Dict order is part of the state: it decides which job is forgotten first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import node_pb2
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..errors import DeniedError

#: A job is owned by the identity that opened its first session, for as long as the registry knows the job:
#: `trainer/NAME` or `admin/NAME` by certificate, `token/SUBJECT` by token, and this one for everybody else, who comes
#: through a Unix socket or to a daemon without certificates.
LOCAL = "local"
IDENTITY_BYTES_MAX = 160
#: Operators may use every job.
_OPERATORS = "admin/"

UP = rpb.NODE_STATE_UP
DRAINING = rpb.NODE_STATE_DRAINING
DOWN = rpb.NODE_STATE_DOWN
#: In the history: a node that was not known before, or is not any more.
UNKNOWN = rpb.NODE_STATE_UNSPECIFIED
NodeState: TypeAlias = rpb.NodeState.ValueType

#: The newest schema that this version knows, and the oldest, which a new cluster begins with: voters of the version
#: before know that one.
SCHEMA = 7
SCHEMA_OLDEST = 7


class MalformedError(ValueError):
    """A command or record that nobody following the rules would send."""


class AnyRef(Protocol):
    """A node in one of its lives, as a message or a `Ref`."""

    @property
    def node_id(self) -> str:
        """Its name."""

    @property
    def incarnation(self) -> int:
        """Its life."""


class Ref(NamedTuple):
    """A node in one of its lives."""

    node_id: str
    incarnation: int

    @classmethod
    def of(cls, ref: AnyRef) -> Ref:
        """As a key."""
        return cls(ref.node_id, ref.incarnation)

    def message(self) -> pb.NodeRef:
        """As records and calls have it."""
        return pb.NodeRef(node_id=self.node_id, incarnation=self.incarnation)


class ShardId(NamedTuple):
    """One shard of a kept committed step."""

    job: str
    step: int
    rank: int
    shard: int

    @classmethod
    def of(cls, key: pb.ShardKey) -> ShardId:
        """As a key."""
        return cls(key.job, key.step, key.rank, key.shard)

    def message(self) -> pb.ShardKey:
        """As commands and calls have it."""
        return pb.ShardKey(job=self.job, step=self.step, rank=self.rank, shard=self.shard)


class Bound(NamedTuple):
    """Steps below `below_step` that sessions below `below_session` made will never be committed."""

    below_step: int
    below_session: int


class Load(NamedTuple):
    """The newest session that was opened to load after an earlier run, and its rank; session 0: there is none."""

    session: int = 0
    rank: int = 0


@dataclass
class Job:
    """All that is known of a job."""

    name: str
    next_session: int
    owner: str = LOCAL
    #: Newest committed step; -1: none. Only a deletion takes it back.
    newest: int = -1
    world_size: int = 0
    ranks: dict[int, log_pb2.RankSeat] = field(default_factory=dict)
    #: Committed steps that are kept, oldest first; the records of a step are in order of their ranks.
    steps: list[rpb.StepRecord] = field(default_factory=list)
    #: Steps that were committed, and the session that would have been opened next; oldest first.
    recent: list[tuple[int, int]] = field(default_factory=list)
    #: Sessions below it are over for good.
    void: int = 0
    superseded: list[Bound] = field(default_factory=list)
    newest_load: Load = field(default_factory=Load)

    @property
    def kept(self) -> list[int]:
        """Numbers of the committed steps that are kept, oldest first."""
        return [kept.step for kept in self.steps]

    def find_step(self, step: int) -> rpb.StepRecord | None:
        """The record of a kept step."""
        return next((kept for kept in self.steps if kept.step == step), None)


@dataclass
class State:
    """What every voter has.

    Attributes:
        schema: what all voters have been seen to know; it rises by a command.
        epoch: counts changes of the membership.
        version: counts all changes that a view shows.
        holders_version: counts changes of who holds what is committed.
        next_incarnation, session_floor: numbers that were never used, also by nodes and jobs that are forgotten.
        voters: as the registry names them; empty while they are those of the config.
        seen: newest results by proposer and number, so that a command is applied once.
    """

    schema: int = SCHEMA_OLDEST
    epoch: int = 0
    version: int = 0
    holders_version: int = 0
    next_incarnation: int = 1
    session_floor: int = 1
    nodes: dict[str, rpb.NodeRecord] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    history: list[rpb.Transition] = field(default_factory=list)
    voters: list[node_pb2.VoterRecord] = field(default_factory=list)
    seen: dict[str, dict[int, log_pb2.RegistryResult]] = field(default_factory=dict)

    def steps_of(self, job: str) -> list[rpb.StepRecord]:
        """Kept steps of a job, which need not be known."""
        return self.jobs[job].steps if job in self.jobs else []


def done() -> log_pb2.RegistryResult:
    """A result that says yes."""
    return log_pb2.RegistryResult(ok=True)


def refusal(
    code: pb.ErrorCode.ValueType, message: str, ranks: tuple[int, ...] = ()
) -> log_pb2.RegistryResult:
    """A result that says no."""
    return log_pb2.RegistryResult(code=code, message=message, ranks=ranks)


def is_live(node: rpb.NodeRecord) -> bool:
    """Whether a node (in its present life) can be read from: DRAINING ones can, until their copies are elsewhere."""
    return node.state in (UP, DRAINING)


def live(state: State, ref: AnyRef) -> bool:
    """Whether a node is there in this very life: its copies count."""
    node = state.nodes.get(ref.node_id)
    return node is not None and node.incarnation == ref.incarnation and is_live(node)


def state_name(state: NodeState) -> str:
    """UP, DRAINING, DOWN or SUSPECT."""
    return rpb.NodeState.Name(state).removeprefix("NODE_STATE_")


def may_use(identity: str, owner: str) -> bool:
    """Whether an identity may open, read, follow and replace the steps of an owner's job."""
    return identity == owner or identity.startswith(_OPERATORS)


def check_use(identity: str, owner: str, job_name: str) -> None:
    """The same as an error.

    Raises:
        DeniedError: it may not; the message says what to do.
    """
    if not may_use(identity, owner):
        raise DeniedError(
            f"job {job_name!r} belongs to {owner}, and this is {identity}: use its owner's certificate or token, "
            "or another name for the job"
        )
