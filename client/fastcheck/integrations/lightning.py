"""Lightning: its checkpoints in other nodes' RAM, every so many steps, beside those on disk.

    io = FastCheckIO(Checkpointer(job="gpt"))
    trainer = Trainer(plugins=[io], callbacks=[MemoryCheckpoint(io, every=1)])
    trainer.fit(model, loader, ckpt_path=io.newest("checkpoints"))

`FastCheckIO` takes `fastcheck://JOB/step-N`, and `fastcheck://JOB` for the newest; every other path goes to Lightning's
own plugin. What Lightning puts into a checkpoint is saved as it is: dicts, lists, tensors, plain values. Anything
else, in hyper-parameters say, is refused with its key; nothing is pickled.

A Lightning checkpoint has no random states; the callback adds them, to those on disk as well.

Lightning finds its place in the loops by the hook in which a checkpoint was built, and validates, ends epochs
and moves learning rates after `on_train_batch_end`. So the callback has a checkpoint built there, holds it, and
saves it right before the next batch is computed on, or the next epoch begins: with the random states, optimizers,
schedulers and callbacks as they are then. So nothing is repeated after a resume.

Under DDP every rank saves and loads a checkpoint of its own: Lightning builds one on each rank, with the rank's own
random states and place in the data, and has rank 0 alone save it; the callback saves those of the others. Strategies
that save in ways of their own (FSDP, DeepSpeed) are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from ..advice import Every
from ..advice import every as policy_of
from ..checkpointer import Checkpointer
from ..collectives import from_all
from ..errors import InvalidArgumentError, LoadFailedError
from ..resume import Generators
from .disk_fallback import PlainState, newest_step

logger = logging.getLogger("fastcheck")

_SCHEME = "fastcheck://"
#: pathlib makes one slash of two.
_URL = re.compile(r"fastcheck:/{1,2}(?P<job>[^/]+)(/step-(?P<step>\d+))?/?")
#: How Lightning's ModelCheckpoint writes the step into a file's name, unless told otherwise.
_STEP_IN_NAME = re.compile(r"step=(\d+)")

#: Results of `newest` other than a step on disk.
_MEMORY, _NOTHING, _NOT_ASKED = -1, -2, -3


class FastCheckIO(CheckpointIO):
    """Checkpoints of one job by URL; other paths go to `other`, by default Lightning's own plugin.

    With several processes, each needs a Checkpointer that knows its rank: from torchrun's variables, or `rank=` and
    `world_size=`.
    """

    def __init__(self, checkpointer: Checkpointer | None = None, other: CheckpointIO | None = None) -> None:
        self.checkpointer = Checkpointer() if checkpointer is None else checkpointer
        self._other = TorchCheckpointIO() if other is None else other
        self._found = _NOT_ASKED
        #: The callback has Lightning build a checkpoint, and saves it later.
        self._held_back = False

    def url(self, step: int) -> str:
        """The URL of a step of this job."""
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
            self._found = _MEMORY
            return f"{_SCHEME}{self.checkpointer.job}"
        self._found = _NOTHING if path is None else step
        return None if path is None else str(path)

    def check_agreement(self) -> None:
        """Check that all ranks resume from the same place. Every rank calls it, once torch.distributed joins them.

        Raises:
            LoadFailedError: they would not; the message says which rank found which checkpoint.
        """
        found_by_rank = [found for (found,) in from_all([self._found], self.checkpointer.world_size)]
        if len(set(found_by_rank)) > 1:
            names = {_MEMORY: "memory", _NOTHING: "nothing", _NOT_ASKED: "did not call newest()"}
            each = (
                f"rank {rank}: {names.get(found, f'step {found} on disk')}"
                for rank, found in enumerate(found_by_rank)
            )
            raise LoadFailedError(
                f"ranks found different checkpoints to resume from ({', '.join(each)}): see their logs for daemons "
                "that did not answer, and start again; or pass all ranks the same ckpt_path"
            )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Hand a copy to the daemon. Failures of the daemon are logged and never raised.

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
        if not self._held_back:
            self.checkpointer.save(step, PlainState(checkpoint))

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The checkpoint at a path or URL, its tensors on the CPU.

        Raises:
            FastCheckError: as `Checkpointer.load`.
        """
        if not _is_url(path):
            on_disk: dict[str, Any] = self._other.load_checkpoint(path, *arguments, **options)
            return on_disk
        kept = PlainState()
        step = self._step(path)
        if self.checkpointer.load(kept, step) is None:
            raise InvalidArgumentError(f"job {self.checkpointer.job} has no committed step to load")
        found: dict[str, Any] = kept.value
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a file. Steps in memory are dropped as newer ones are committed."""
        if not _is_url(path):
            self._other.remove_checkpoint(path)

    def teardown(self) -> None:
        """Does nothing: the Checkpointer belongs to the caller, who may fit again."""
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
    return str(path).startswith(_SCHEME.removesuffix("//"))


class MemoryCheckpoint(pl.Callback):
    """Saves a Trainer's checkpoint to memory every so many optimizer steps, as ModelCheckpoint does to disk, with the
    random states.

    Args:
        io: the Trainer's plugin.
        every: steps between saves, or a policy from `fastcheck.every`.

    When a run resumes, the generators are set right before the first batch is computed on; of a checkpoint from the end
    of an epoch, before the next one's data is shuffled. So a data set must not draw from the training process'
    generators in the middle of an epoch, which it does not if the loader has workers.
    """

    def __init__(self, io: FastCheckIO, *, every: int | Every = 1) -> None:
        self._io = io
        self._due = every if isinstance(every, Every) else policy_of(every)
        self._saved_step = 0
        #: Whether the last batch of an epoch is done, and the next epoch has not begun.
        self._epoch_done = False
        self._loaded: Mapping[str, Any] | None = None
        #: Whether that came with a loader's place in the data.
        self._loader_resumed = False
        #: The checkpoint that Lightning built for a step that is not saved yet.
        self._held: tuple[int, dict[str, Any]] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse settings that cannot work, before anything runs."""
        own = type(trainer.strategy)
        if (own.save_checkpoint, own.load_checkpoint) != (Strategy.save_checkpoint, Strategy.load_checkpoint):
            raise InvalidArgumentError(
                f"{own.__name__} saves and loads in a way of its own, past the FastCheckIO: train with one process or "
                "DDP, or save from a loop of your own, see docs/guides/fsdp2.md"
            )
        seat, place = self._io.checkpointer, (trainer.global_rank, trainer.world_size)
        if (seat.rank, seat.world_size) != place:
            raise InvalidArgumentError(
                f"this process is rank {place[0]} of {place[1]} for Lightning, and rank {seat.rank} of "
                f"{seat.world_size} for its Checkpointer: start every rank with torchrun, or pass "
                "Checkpointer(rank=, world_size=)"
            )
        if trainer.strategy.checkpoint_io is not self._io:
            raise InvalidArgumentError(
                "pass the callback's FastCheckIO to the Trainer too: Trainer(plugins=[io])"
            )
        self._io.check_agreement()

    def state_dict(self) -> dict[str, Any]:
        """The callback's part of every checkpoint, on disk too."""
        rank = self._io.checkpointer.rank
        return {"rng": Generators().state_dict(), "epoch_done": self._epoch_done, "rank": rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training is where it was, unless it is another rank's: all ranks would draw the same numbers."""
        theirs, mine = state_dict.get("rank", 0), self._io.checkpointer.rank
        if theirs == mine:
            self._loaded = state_dict
        else:
            logger.warning(
                "the checkpoint is of rank %d, as Lightning's files are: rank %d draws numbers of its own",
                theirs,
                mine,
            )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note whether a loader resumes its position."""
        of_loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        self._loader_resumed = bool(of_loop.get("combined_loader"))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the loaded step, which need not be saved again."""
        if trainer.world_size > 1 and any(
            hasattr(one, "consolidate_state_dict") for one in trainer.optimizers
        ):
            raise InvalidArgumentError(
                "an optimizer that shards its state (ZeroRedundancyOptimizer) has Lightning put it together on rank 0 "
                "alone, and FastCheck needs every rank's: use one that does not, or a loop of your own"
            )
        self._saved_step = trainer.global_step
        if self._loaded is not None and self._loaded["epoch_done"]:
            _go_on_after_epoch(trainer.fit_loop, loader_resumed=self._loader_resumed)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step of the epoch before; restore the generators before Lightning iterates over the loader."""
        self._save_held(trainer)
        if self._loaded is not None and self._loaded["epoch_done"]:
            Generators().load_state_dict(self._loaded["rng"])

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the generators; save the last step."""
        self._epoch_done = False
        loaded, self._loaded = self._loaded, None
        if loaded is not None and not loaded["epoch_done"]:
            Generators().load_state_dict(loaded["rng"])
        self._save_held(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Have Lightning build a checkpoint if one is due and an optimizer has stepped."""
        step = trainer.global_step
        self._epoch_done = trainer.is_last_batch
        if step > self._saved_step and self._due(step):
            self._saved_step = step
            self._io._held_back = True
            try:
                trainer.save_checkpoint(self._io.url(step), weights_only=False)
            finally:
                self._io._held_back = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The numbers go on from here, unless it was run only since training stops in the middle of an epoch."""
        if self._held is not None and (
            self._epoch_done or not trainer.should_stop or _validates_now(trainer)
        ):
            self._renew(trainer, self._held[1])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning leaves out schedulers that go by a metric in the epoch that it resumed, for it may be missing."""
        monitored = [each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
        if (
            monitored
            and trainer.fit_loop.restarting
            and all(m in trainer.callback_metrics for m in monitored)
        ):
            trainer.fit_loop.on_iteration_done()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step; what the end of an epoch draws is not drawn in one that goes on later."""
        self._save_held(trainer, renew=self._epoch_done)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save the last step, unless validation fails: weights may be others meanwhile."""
        if trainer.training:
            self._save_held(trainer, renew=False)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning comes by here on every rank, and at its CheckpointIO on rank 0 alone."""
        if self._io._held_back:
            self._held = trainer.global_step, checkpoint

    def _save_held(self, trainer: pl.Trainer, *, renew: bool = True) -> None:
        held, self._held = self._held, None
        if held is not None:
            step, checkpoint = held
            if renew:
                self._renew(trainer, checkpoint)
            self._io.save_checkpoint(checkpoint, self._io.url(step))

    def _renew(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """What may have changed since the checkpoint was put together; the model's tensors are the model's own."""
        checkpoint["optimizer_states"] = [
            trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers
        ]
        checkpoint["lr_schedulers"] = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
        for one in trainer.callbacks:
            if state := one.state_dict():
                checkpoint["callbacks"][one.state_key] = state


def _validates_now(trainer: pl.Trainer) -> bool:
    """Whether the validation in the middle of an epoch is one that comes at every so many batches."""
    batches = trainer.val_check_batch
    if batches is None or batches == float("inf"):  # by the clock, or at the end of an epoch
        return False
    fit = trainer.fit_loop
    index = fit.total_batch_idx if trainer.check_val_every_n_epoch is None else fit.batch_idx
    return bool((index + 1) % int(batches) == 0)


def _go_on_after_epoch(fit: Any, *, loader_resumed: bool) -> None:
    """Have the fit loop begin the next epoch, where all batches of the saved one are done.

    Lightning takes what comes for the rest of that epoch: it does not call `on_train_epoch_start`, goes on with the
    iterator that it made before the generators were put back, and loses count of the epochs for the next resume. A
    loader that knows its place, which is its end, has nothing for that rest: then a whole epoch is skipped.
    """
    epoch = fit.epoch_loop
    if fit.restarted_mid_epoch and epoch.restarted_on_train_batch_end:
        # What Lightning's own reset of the loop does.
        epoch.batch_progress.increment_completed()
        epoch._batches_that_stepped += 1
        epoch.on_iteration_done()
        if loader_resumed:
            # torchdata's samplers remember the place until somebody asks for what comes there: nothing.
            next(fit._data_fetcher, None)
        fit.on_iteration_done()
    elif fit.resumed_on_epoch_end:
        fit.on_iteration_done()
