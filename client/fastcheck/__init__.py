"""FastCheck for trainers: `Checkpointer` keeps the state of a training job in other nodes' RAM.

    ckpt = Checkpointer(job="gpt")
    step = ckpt.load(state)               # in place; None when there is nothing yet
    handle = ckpt.save(step, state)       # returns when `state` may change again
    handle.result(timeout=60)             # replicated and committed

Importing the package is cheap and needs neither torch nor a daemon: the admin CLI lives here too.
`Checkpointer` and `SaveHandle` bring torch in when first named. `fastcheck.resume` has what a state needs besides
model and optimizer, `fastcheck.integrations` what other frameworks call.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from .errors import (
    ClosedError,
    CorruptError,
    DaemonUnavailableError,
    DeniedError,
    FastCheckError,
    FencedError,
    InvalidArgumentError,
    InvalidNameError,
    LoadFailedError,
    LossyCheckpointError,
    LostError,
    NotNewerError,
    OutOfMemoryError,
    PartialLoadError,
    RegistryUnavailableError,
    ReplicasDisagreeError,
    ReplicationError,
    SaveFailedError,
    SaveTimeoutError,
    StateChangedError,
    StateMismatchError,
    StepNotFoundError,
    SupersededError,
    UnsafeError,
    UnsupportedStateError,
    WorldSizeError,
)

if TYPE_CHECKING:
    from .advice import Advice, advise, every
    from .checkpointer import Checkpointer
    from .handle import SaveHandle
    from .progress import LoadProgress

__all__ = [
    "Advice",
    "Checkpointer",
    "ClosedError",
    "CorruptError",
    "DaemonUnavailableError",
    "DeniedError",
    "FastCheckError",
    "FencedError",
    "InvalidArgumentError",
    "InvalidNameError",
    "LoadFailedError",
    "LoadProgress",
    "LossyCheckpointError",
    "LostError",
    "NotNewerError",
    "OutOfMemoryError",
    "PartialLoadError",
    "RegistryUnavailableError",
    "ReplicasDisagreeError",
    "ReplicationError",
    "SaveFailedError",
    "SaveHandle",
    "SaveTimeoutError",
    "StateChangedError",
    "StateMismatchError",
    "StepNotFoundError",
    "SupersededError",
    "UnsafeError",
    "UnsupportedStateError",
    "WorldSizeError",
    "advise",
    "every",
]

_LAZY = {
    "Advice": ".advice",
    "Checkpointer": ".checkpointer",
    "LoadProgress": ".progress",
    "SaveHandle": ".handle",
    "advise": ".advice",
    "every": ".advice",
}


def _version() -> str:
    try:
        return metadata.version("fastcheck")
    except metadata.PackageNotFoundError:
        return "0+source"  # run from a source tree that is not installed


__version__ = _version()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
