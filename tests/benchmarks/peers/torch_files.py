"""What comes with torch: `torch.save`, and distributed checkpoints (DCP), into files on the machine's memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from .candidate import State, UntilSafe, already_safe, fill


class TorchSave:
    """`torch.save` into a new file that then takes the old one's name; `torch.load`, then a copy."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.pt"

    def save(self, step: int, state: State) -> UntilSafe:
        """Returns when the file has its name."""
        new = self._file.with_suffix(".new")
        torch.save(state, new)
        new.replace(self._file)
        return already_safe

    def restore(self, state: State) -> None:
        """It has no way to load into tensors that exist."""
        fill(state, torch.load(self._file, weights_only=True))

    def close(self) -> None:
        """The folder goes with the process."""


class _StepFolders:
    """One folder per step of a run; when one is whole, the one before goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest: Path | None = None

    def new(self, step: int) -> Path:
        """Where it goes."""
        return self._folder / f"step-{step}"

    @property
    def newest(self) -> Path:
        """The last one that was kept."""
        assert self._newest is not None
        return self._newest

    def keep(self, path: Path) -> None:
        """It is whole now."""
        if self._newest is not None:
            shutil.rmtree(self._newest)
        self._newest = path


class Dcp:
    """One folder per step, the newest stays.

    Args:
        kind: "save", "thread", "process", or "stager": in a thread, with a stager that keeps its memory.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        # Loading them takes a second.
        import torch.distributed as dist  # noqa: PLC0415
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415

        self._dcp, self._dist = dcp, dist
        self._folders, self._kind = _StepFolders(folder), kind
        self._stager: Any = None
        self._options: dict[str, Any] = {}
        if kind == "process":
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: PLC0415

            # Its process talks to this one through a group.
            dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        if kind == "stager":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: PLC0415

            # Its pinned memory, its stream and its copies in the background are refused without a GPU.
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
            self._options["async_stager"] = self._stager

    def save(self, step: int, state: State) -> UntilSafe:
        """`save` returns when the files are there; the others when the state is copied."""
        path = self._folders.new(step)
        if self._kind == "save":
            self._dcp.save(state, checkpoint_id=path)
            self._folders.keep(path)
            return already_safe
        future = self._dcp.async_save(state, checkpoint_id=path, **self._options)

        def until_safe() -> dict[str, float]:
            future.result()
            self._folders.keep(path)
            return {}

        return until_safe

    def restore(self, state: State) -> None:
        """Straight into the tensors that exist."""
        self._dcp.load(state, checkpoint_id=self._folders.newest)

    def close(self) -> None:
        """End what was started."""
        if self._stager is not None:
            self._stager.close()
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


class Torchsnapshot:
    """`Snapshot.take` or `async_take`, one folder per step, the newest stays."""

    def __init__(self, folder: Path, *, in_background: bool) -> None:
        import torchsnapshot  # noqa: PLC0415

        self._lib: Any = torchsnapshot
        self._folders, self._in_background = _StepFolders(folder), in_background

    def save(self, step: int, state: State) -> UntilSafe:
        """`take` returns when the files are there, `async_take` when the state is copied."""
        path = self._folders.new(step)
        app = {"state": self._lib.StateDict(**state)}
        if not self._in_background:
            self._lib.Snapshot.take(str(path), app)
            self._folders.keep(path)
            return already_safe
        pending = self._lib.Snapshot.async_take(str(path), app)

        def until_safe() -> dict[str, float]:
            pending.wait()
            self._folders.keep(path)
            return {}

        return until_safe

    def restore(self, state: State) -> None:
        """Straight into the tensors that exist."""
        app = {"state": self._lib.StateDict(**state)}
        self._lib.Snapshot(str(self._folders.newest)).restore(app)
        fill(state, app["state"])  # a no-op copy where it is the very tensor

    def close(self) -> None:
        """The folder goes with the process."""
