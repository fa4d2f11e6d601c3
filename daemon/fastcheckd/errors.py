"""The daemon's one error tree. A message says what failed, whose side it is on and what to do next.

    FastCheckdError
    ├── ConfigError            the operator's file, environment or flags
    ├── InvalidRequestError    the caller sent something malformed
    ├── FencedError            the caller speaks for a life that is over
    │   └── IncarnationOverError   that of its node: the node's next one may repeat the call
    ├── DeniedError            the caller is known, and may not do this
    ├── StoreError
    │   ├── OverBudgetError    this node's RAM budget
    │   │   └── JobBudgetError     what one job may have of it
    │   ├── StoreFullError     the tmpfs underneath
    │   ├── NotHeldError       no such replica here
    │   └── CorruptError       bytes and digest disagree
    ├── CodecError             an encoded chunk is malformed, or for another base
    │   └── MispredictedError  well-formed, but the outcome is not what was encoded
    ├── TransferError
    │   ├── NoLeaseError       this node may have been declared DOWN: it takes nothing
    │   ├── FrameError         the other end of a lane broke the protocol
    │   └── PeerError          a peer cannot be reached, or refused
    ├── RegistryError
    │   ├── NoQuorumError      no leader that can commit
    │   ├── PlacementError     too few healthy nodes
    │   ├── HolderLostError    a holder died between its acknowledgement and the commit
    │   ├── NotNewerError      step is not newer than the newest committed one
    │   ├── SupersededError    a newer step took this one's place
    │   ├── UnsafeError        committed bytes or the quorum would be lost
    │   ├── ReplicasDisagreeError  ranks do not hold what they should hold alike
    │   └── WorldSizeError     ranks disagree about their number
    └── RestoreError
        ├── StepGoneError      the asked-for step is not kept
        └── LostError          every copy of a shard is bad or gone

Every class carries the wire's `ErrorCode`, so the services translate without a table of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastcheck_proto.v1 import common_pb2 as pb

#: Exit code of a process whose configuration cannot work (sysexits.h EX_CONFIG).
EXIT_CONFIG = 78


class FastCheckdError(Exception):
    """Base of all errors that the daemon raises on purpose."""

    code: pb.ErrorCode.ValueType = pb.ERROR_CODE_INTERNAL


class ConfigError(FastCheckdError):
    code = pb.ERROR_CODE_INVALID


class InvalidRequestError(FastCheckdError):
    code = pb.ERROR_CODE_INVALID


class FencedError(FastCheckdError):
    code = pb.ERROR_CODE_FENCED


class IncarnationOverError(FencedError):
    code = pb.ERROR_CODE_INCARNATION_OVER


class DeniedError(FastCheckdError):
    code = pb.ERROR_CODE_DENIED


class StoreError(FastCheckdError):
    pass


class OverBudgetError(StoreError):
    code = pb.ERROR_CODE_OVER_BUDGET


class JobBudgetError(OverBudgetError):
    code = pb.ERROR_CODE_JOB_BUDGET


class StoreFullError(StoreError):
    code = pb.ERROR_CODE_STORE_FULL


class NotHeldError(StoreError):
    code = pb.ERROR_CODE_NOT_FOUND


class CorruptError(StoreError):
    code = pb.ERROR_CODE_CORRUPT


class CodecError(FastCheckdError):
    code = pb.ERROR_CODE_CORRUPT


class MispredictedError(CodecError):
    pass


class TransferError(FastCheckdError):
    code = pb.ERROR_CODE_UNREACHABLE


class NoLeaseError(TransferError):
    code = pb.ERROR_CODE_NO_LEASE


class FrameError(TransferError):
    code = pb.ERROR_CODE_INVALID


class PeerError(TransferError):
    """A peer could not be reached or refused; `reason` is the code it gave, if any."""

    def __init__(self, message: str, reason: pb.ErrorCode.ValueType = pb.ERROR_CODE_UNREACHABLE) -> None:
        super().__init__(message)
        self.reason = reason


class RegistryError(FastCheckdError):
    pass


class NoQuorumError(RegistryError):
    code = pb.ERROR_CODE_NO_QUORUM


class PlacementError(RegistryError):
    code = pb.ERROR_CODE_NO_PLACEMENT


class HolderLostError(RegistryError):
    """Carries the node ids to replace."""

    code = pb.ERROR_CODE_HOLDER_LOST

    def __init__(self, message: str, node_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.node_ids = node_ids


class NotNewerError(RegistryError):
    code = pb.ERROR_CODE_NOT_NEWER


class SupersededError(RegistryError):
    code = pb.ERROR_CODE_SUPERSEDED


class UnsafeError(RegistryError):
    code = pb.ERROR_CODE_UNSAFE


class WorldSizeError(RegistryError):
    code = pb.ERROR_CODE_WORLD_SIZE


class ReplicasDisagreeError(RegistryError):
    """Carries where they disagree, if their layouts agree."""

    code = pb.ERROR_CODE_REPLICAS_DISAGREE

    def __init__(self, message: str, disagreements: Iterable[pb.Disagreement] = ()) -> None:
        super().__init__(message)
        self.disagreements = tuple(disagreements)


class RestoreError(FastCheckdError):
    pass


class StepGoneError(RestoreError):
    code = pb.ERROR_CODE_NOT_FOUND


class LostError(RestoreError):
    code = pb.ERROR_CODE_LOST


_BY_CODE: dict[int, type[FastCheckdError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError, FencedError, IncarnationOverError, OverBudgetError, JobBudgetError, StoreFullError,
        NotHeldError, CorruptError,
        NoQuorumError, PlacementError, HolderLostError, NotNewerError, SupersededError, WorldSizeError,
        LostError, NoLeaseError, UnsafeError, ReplicasDisagreeError, DeniedError,
    )
}  # fmt: skip


def from_code(code: int, message: str) -> FastCheckdError:
    """The error that a wire code stands for: what one process raised, another can raise again."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return PeerError(message) if code == pb.ERROR_CODE_UNREACHABLE else FastCheckdError(message)
    return cls(message)
