"""Lightning: its checkpoints in other nodes' RAM, every so many steps, beside those on disk.

    io = FastCheckIO(Checkpointer(job="gpt"))
    trainer = Trainer(plugins=[io], callbacks=[FastCheckCallback(io, every=1)])
    trainer.fit(model, loader, ckpt_path=io.newest("checkpoints"))

`FastCheckIO` takes `fastcheck://JOB/step-N`, and `fastcheck://JOB` for the newest; every other path goes to Lightning's
own plugin. What Lightning puts into a checkpoint is saved as it is: dicts, lists, tensors, plain values. Anything
else, in hyper-parameters say, is refused with its key; nothing is pickled.

A Lightning checkpoint has no random states; the callback adds them, to those on disk as well.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from ..checkpointer import Checkpointer
from ..errors import InvalidArgumentError
from ..policies import Every
from ..policies import every as policy_of
from ..resume import Generators
from .keeping import Kept, newest_step

logger = logging.getLogger("fastcheck")

_SCHEME = "fastcheck://"
_URL = re.compile(r"fastcheck://(?P<job>[^/]+)(/step-(?P<step>\d+))?/?")
#: How Lightning's ModelCheckpoint writes the step into a file's name, unless told otherwise.
_STEP_IN_NAME = re.compile(r"step=(\d+)")


class FastCheckIO(CheckpointIO):
    """Checkpoints of one job by URL; paths that are none go to `other`, by default Lightning's own.

    Lightning has rank 0 alone save and every rank load, so this is for a Trainer with one process.
    """

    def __init__(self, checkpointer: Checkpointer | None = None, other: CheckpointIO | None = None) -> None:
        self.checkpointer = Checkpointer() if checkpointer is None else checkpointer
        self._other = TorchCheckpointIO() if other is None else other

    def url(self, step: int) -> str:
        """Of a step of this job."""
        return f"{_SCHEME}{self.checkpointer.job}/step-{step}"

    def newest(self, folder: str | Path | None = None) -> str | None:
        """For `trainer.fit(ckpt_path=...)`: the newer of memory and the `.ckpt` files below a folder; None: neither.

        Files are judged by `step=N` in their names. If memory is out of reach they count, with a warning.
        """
        on_disk = [
            (int(found[1]), path)
            for path in (Path(folder).rglob("*.ckpt") if folder is not None else ())
            if (found := _STEP_IN_NAME.search(path.name))
        ]
        step, path = max(on_disk, default=(-1, None))
        in_memory = newest_step(self.checkpointer)
        if in_memory is not None and in_memory >= step:
            return f"{_SCHEME}{self.checkpointer.job}"
        return None if path is None else str(path)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Hand a copy to the daemon; what goes wrong there is logged and never raises.

        Raises:
            UnsupportedStateError: the checkpoint holds something that cannot be saved; the message names its key.
            InvalidArgumentError: the URL is not one of this job and a step.
        """
        if not _is_url(path):
            self._other.save_checkpoint(checkpoint, path, storage_options)
            return
        step = self._step(path)
        if step is None:
            raise InvalidArgumentError(f"{path} names no step: save to {self.url(0)[:-1]}N")
        self.checkpointer.save(step, Kept(checkpoint))

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The checkpoint at a path or URL, its tensors on the CPU.

        Raises:
            FastCheckError: as `Checkpointer.load`.
        """
        if not _is_url(path):
            on_disk: dict[str, Any] = self._other.load_checkpoint(path, *arguments, **options)
            return on_disk
        kept = Kept()
        step = self._step(path)
        if self.checkpointer.load(kept, step) is None:
            raise InvalidArgumentError(f"job {self.checkpointer.job} has no committed step to load")
        found: dict[str, Any] = kept.value
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a file. Steps in memory go by themselves, as newer ones come."""
        if not _is_url(path):
            self._other.remove_checkpoint(path)

    def teardown(self) -> None:
        """Nothing: the Checkpointer is the caller's, who may fit again."""
        self._other.teardown()

    def _step(self, path: str | Path) -> int | None:
        found = _URL.fullmatch(str(path))
        if found is None or found["job"] != self.checkpointer.job:
            raise InvalidArgumentError(
                f"{path} is no checkpoint of job {self.checkpointer.job}: that would be "
                f"{self.url(0)[:-1]}N, or {_SCHEME}{self.checkpointer.job} for the newest"
            )
        return None if found["step"] is None else int(found["step"])


def _is_url(path: str | Path) -> bool:
    return str(path).startswith(_SCHEME)


class FastCheckCallback(pl.Callback):
    """Saves a Trainer's checkpoint to memory every so many optimizer steps, with the random states.

    Args:
        io: the Trainer's plugin.
        every: steps between saves, or a policy from `fastcheck.every`.

    When a run resumes, the generators are set right before the first batch is computed on; of a checkpoint from the end
    of an epoch, before the next one begins. So a data set must not draw from the training process' generators in the
    middle of an epoch, which it does not if the loader has workers.
    """

    def __init__(self, io: FastCheckIO, *, every: int | Every = 1) -> None:
        self._io = io
        self._due = every if isinstance(every, Every) else policy_of(every)
        self._saved_step = 0
        self._epoch_done = False
        self._loaded: Mapping[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything runs."""
        if trainer.world_size > 1:
            raise InvalidArgumentError(
                "Lightning has rank 0 alone save for all, which FastCheck's copies per rank do not fit: train with one "
                "process, or save from a loop of your own, see docs/guides/fsdp2.md"
            )
        if trainer.strategy.checkpoint_io is not self._io:
            raise InvalidArgumentError(
                "pass the callback's FastCheckIO to the Trainer too: Trainer(plugins=[io])"
            )

    def state_dict(self) -> dict[str, Any]:
        """Goes into every checkpoint, on disk too."""
        return {"rng": Generators().state_dict(), "epoch_done": self._epoch_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training is where it was."""
        self._loaded = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What was loaded need not be saved again."""
        self._saved_step = trainer.global_step

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning may begin and end an epoch that was done before it begins the next: so perhaps twice."""
        self._epoch_done = False
        if self._loaded is not None and self._loaded["epoch_done"]:
            Generators().load_state_dict(self._loaded["rng"])

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go on with the numbers that were next."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and not loaded["epoch_done"]:
            Generators().load_state_dict(loaded["rng"])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, and an optimizer has made a step."""
        step = trainer.global_step
        self._epoch_done = trainer.is_last_batch
        if step > self._saved_step and self._due(step):
            self._saved_step = step
            trainer.save_checkpoint(self._io.url(step), weights_only=False)
