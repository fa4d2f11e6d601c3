"""The one error tree of the SDK. A message says what failed, whose side it is on and what to do next.

    FastCheckError
    ├── InvalidArgumentError (ValueError)      rank, step, address, environment
    │   └── InvalidNameError                   the job's name
    ├── UnsupportedStateError (TypeError)      something in the caller's state cannot be saved or filled
    ├── StateMismatchError (ValueError)        caller's state and checkpoint do not fit; nothing was changed
    ├── PartialLoadError (RuntimeError)        an object refused its state when others were filled already
    ├── ClosedError (RuntimeError)             used after close()
    ├── SaveTimeoutError (TimeoutError)        result(timeout): not done yet; the save goes on
    ├── DaemonUnavailableError (ConnectionError)   this node's daemon cannot be reached or stopped answering
    ├── RegistryUnavailableError (ConnectionError) no leader that can commit
    ├── OutOfMemoryError (MemoryError)         the node's RAM budget, the job's part of it, or the RAM file system
    ├── FencedError                            a newer process took this rank's place, or its job's steps were deleted
    ├── DeniedError (PermissionError)          this process is known to the daemon, and may not do this
    ├── UnsafeError                            committed bytes or the registry's quorum would be lost
    ├── WorldSizeError (ValueError)            the step was saved with another number of ranks
    ├── SaveFailedError                        the step will not be committed
    │   ├── NotNewerError                      a committed step is as new
    │   ├── SupersededError                    a newer step took its place
    │   ├── ReplicasDisagreeError              ranks do not hold what they should hold alike
    │   ├── StateChangedError                  it changed while a lazy save was copying it
    │   └── ReplicationError                   too few healthy peers, or they failed on the way
    └── LoadFailedError
        ├── StepNotFoundError (LookupError)    the asked-for step is not kept
        ├── CorruptError                       bytes that cannot be trusted
        ├── LostError                          every copy of a shard is bad or gone
        └── LossyCheckpointError               the step is not exact, and exactness was asked for

Mixed-in builtins are there so that code that knows nothing of FastCheck catches what it expects to.
Nothing here may import torch or gRPC: the admin CLI shares this tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastcheck_proto.v1 import common_pb2 as pb

MISMATCHES_SHOWN_MAX = 10


class FastCheckError(Exception):
    """Base of all errors that FastCheck raises on purpose."""


class InvalidArgumentError(FastCheckError, ValueError):
    """An argument or an environment variable is not usable."""


class InvalidNameError(InvalidArgumentError):
    """The job's name is not one."""


class UnsupportedStateError(FastCheckError, TypeError):
    """The caller's state holds something that cannot be saved, or filled in place."""


class StateMismatchError(FastCheckError, ValueError):
    """The caller's state does not fit the checkpoint. Nothing was changed.

    `mismatches` has one sentence per entry, all of them; the message shows the first ten.
    """

    def __init__(self, mismatches: Sequence[str]) -> None:
        self.mismatches = tuple(mismatches)
        shown = [f"\n  - {m}" for m in self.mismatches[:MISMATCHES_SHOWN_MAX]]
        more = len(self.mismatches) - len(shown)
        if more > 0:
            shown.append(f"\n  - and {more} more (see .mismatches)")
        super().__init__(
            "the state does not fit the checkpoint, nothing was changed; build the model and the optimizer "
            "as they were when it was saved:" + "".join(shown)
        )

    def __reduce__(self) -> tuple[type[StateMismatchError], tuple[tuple[str, ...]]]:
        """Ranks send each other their errors, as torch.distributed.checkpoint does: not the message, what it is of."""
        return type(self), (self.mismatches,)


class PartialLoadError(FastCheckError, RuntimeError):
    """An object's `load_state_dict` failed after other parts of the state were filled."""


class ClosedError(FastCheckError, RuntimeError):
    """The Checkpointer was closed."""


class SaveTimeoutError(FastCheckError, TimeoutError):
    """The save was not done in the time that the caller gave; it goes on."""


class DaemonUnavailableError(FastCheckError, ConnectionError):
    """This node's daemon cannot be reached, or stopped answering."""


class RegistryUnavailableError(FastCheckError, ConnectionError):
    """The cluster's registry has no leader that can commit."""


class OutOfMemoryError(FastCheckError, MemoryError):
    """The node's RAM budget, what one job may have of it, or the RAM file system has no room."""


class FencedError(FastCheckError):
    """A newer process took this rank's place in the job: all later saves fail as well. Or what was not committed is
    void, since the job's newest step was deleted or this process loaded again: later saves go on in a new session."""


class DeniedError(FastCheckError, PermissionError):
    """The daemon knows who this process is, and it may not do this: another role's call, or another's job."""


class UnsafeError(FastCheckError):
    """What was asked for would lose committed bytes or the registry's quorum. Nothing was changed."""


class WorldSizeError(FastCheckError, ValueError):
    """The step was saved with another number of ranks, or the ranks disagree about it."""


class SaveFailedError(FastCheckError):
    """The step will not be committed."""


class NotNewerError(SaveFailedError):
    """A step at least as new is committed already."""


class SupersededError(SaveFailedError):
    """A newer step took this one's place before it was committed."""


class StateChangedError(SaveFailedError):
    """The state was changed while a lazy save was still copying it; nothing of it was kept.

    `names` has the tensors that changed.
    """

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class ReplicationError(SaveFailedError):
    """Too few healthy peers for the copies asked for, or they failed on the way."""


class ReplicasDisagreeError(SaveFailedError):
    """Ranks of a Checkpointer with `replicated=True` do not hold the same. The step is not committed on any.

    `parts`: numbers of the parts of the state that differ → the ranks that differ there; part r is the one that rank r
    saves. `minority`: whether those ranks differ from most others; if not, nobody can say which ones are right.
    No parts are named if not even names, shapes and dtypes are the same, or if only some ranks say that their state is
    replicated.
    """

    def __init__(
        self, message: str, parts: Mapping[int, tuple[int, ...]] | None = None, *, minority: bool = False
    ) -> None:
        super().__init__(message)
        self.parts = dict(parts or {})
        self.minority = minority

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ in any part."""
        return tuple(sorted({rank for ranks in self.parts.values() for rank in ranks}))


class LoadFailedError(FastCheckError):
    """The checkpoint could not be brought here."""


class StepNotFoundError(LoadFailedError, LookupError):
    """The asked-for step is not kept."""


class CorruptError(LoadFailedError):
    """Bytes that came as a checkpoint are not one, or do not match their digest."""


class LostError(LoadFailedError):
    """Every copy of a shard is bad or gone."""


class LossyCheckpointError(LoadFailedError):
    """The step was saved with a lossy coding, and exactness was asked for. Nothing was changed."""


_BY_CODE: dict[int, type[FastCheckError]] = {
    pb.ERROR_CODE_INVALID: InvalidArgumentError,
    pb.ERROR_CODE_OVER_BUDGET: OutOfMemoryError,
    pb.ERROR_CODE_JOB_BUDGET: OutOfMemoryError,
    pb.ERROR_CODE_STORE_FULL: OutOfMemoryError,
    pb.ERROR_CODE_NOT_FOUND: StepNotFoundError,
    pb.ERROR_CODE_CORRUPT: CorruptError,
    pb.ERROR_CODE_FENCED: FencedError,
    pb.ERROR_CODE_INCARNATION_OVER: FencedError,
    pb.ERROR_CODE_NO_QUORUM: RegistryUnavailableError,
    pb.ERROR_CODE_NO_PLACEMENT: ReplicationError,
    pb.ERROR_CODE_NOT_NEWER: NotNewerError,
    pb.ERROR_CODE_WORLD_SIZE: WorldSizeError,
    pb.ERROR_CODE_LOST: LostError,
    pb.ERROR_CODE_SUPERSEDED: SupersededError,
    pb.ERROR_CODE_UNREACHABLE: ReplicationError,
    pb.ERROR_CODE_HOLDER_LOST: ReplicationError,
    pb.ERROR_CODE_NO_LEASE: ReplicationError,
    pb.ERROR_CODE_UNSAFE: UnsafeError,
    pb.ERROR_CODE_DENIED: DeniedError,
    pb.ERROR_CODE_REPLICAS_DISAGREE: ReplicasDisagreeError,
}


def from_code(code: int, message: str) -> FastCheckError:
    """The error that a wire code stands for; an unknown code gives the base class."""
    return _BY_CODE.get(code, FastCheckError)(message)
