"""Libraries made for checkpoints in memory: DLRover's flash checkpoint, nvidia-resiliency-ext's local checkpoints."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from .candidate import Places, State, UntilSafe, already_safe, fill, outline


class Dlrover:
    """Flash checkpoint to memory. Its saving process is started by the library, as it does without its launcher.

    Its replicas on other nodes take a process group of several nodes; this is the copy on the own node alone.
    """

    def __init__(self, places: Places) -> None:
        # Names its shared memory, which outlives the process if it is killed; whoever started it looks for this name.
        os.environ["TORCHELASTIC_RUN_ID"] = places.memory.name
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # noqa: PLC0415
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # noqa: PLC0415

        logging.disable(logging.INFO)  # a dozen lines per save
        self._memory = StorageType.MEMORY
        self._checkpointer: Any = DdpCheckpointer(str(places.disk / "storage"))
        self._saved = 0

    def save(self, step: int, state: State) -> UntilSafe:
        """Returns when the state is in shared memory.

        Raises:
            RuntimeError: it skipped the save, which it does silently.
        """
        self._checkpointer.save_checkpoint(step, outline(state), storage_type=self._memory)
        if self._checkpointer._engine._cached_step != step:
            raise RuntimeError(f"DLRover skipped the save of step {step}")
        return already_safe

    def restore(self, state: State) -> None:
        """Copies out of shared memory what it returns."""
        fill(state, self._checkpointer.load_checkpoint())

    def close(self) -> None:
        """Remove the shared memory; its process ends with this one."""
        self._checkpointer._engine._shm_handler.unlink()
        self._checkpointer._engine.close()


class Resiliency:
    """Local checkpoints of nvidia-resiliency-ext, without replicas, saved at once.

    Its own class for states refuses tensors that are not on a GPU, and its saving in the background waits for one. So
    the interface that it has for other states is implemented for the CPU, and `save` is the blocking one.
    """

    def __init__(self, folder: Path) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (  # noqa: PLC0415
            LocalCheckpointManager,
        )

        from . import resiliency_state  # noqa: PLC0415  it subclasses the library's

        self._dist: Any = dist
        self._state_class = resiliency_state.CpuState
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        self._manager: Any = LocalCheckpointManager(str(folder))

    def save(self, step: int, state: State) -> UntilSafe:
        """Returns when the file is there and found valid; the older ones are gone then."""
        self._manager.save(self._state_class(outline(state)), step)
        return already_safe

    def restore(self, state: State) -> None:
        """Copies what it returns."""
        self._manager.find_latest()
        loaded, _ = self._manager.load()
        fill(state, loaded.state_dict)

    def close(self) -> None:
        """The folder goes with the process."""
        self._dist.destroy_process_group()
