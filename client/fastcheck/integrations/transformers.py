"""Hugging Face's Trainer: saves to other nodes' RAM beside its own checkpoints on disk, and resumes from the newest.

    callback = FastCheckCallback(Checkpointer(job="gpt"), every=1)
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))

A Trainer resumes from a folder. `resume` makes one, in memory, with the model and trainer_state.json: the Trainer
itself then finds its epoch, skips data and goes on counting, in its own way. Optimizer, scheduler and scaler are put
back when training begins, the random generators when the first step does: none of that passes through a file.

Saved is the moment between two steps, when the next batch is there and nothing was computed on it: that is where the
Trainer puts random states back, so what dropout draws goes on bit for bit. After the last step of a run there is no
such moment. If an epoch ended with it, the generators are put back before the next epoch's data is shuffled.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..advice import Every
from ..advice import every as policy_of
from ..checkpointer import Checkpointer
from ..errors import InvalidArgumentError
from ..resume import Generators
from .disk_fallback import PlainState, load_newer

logger = logging.getLogger("fastcheck")

#: Keys of the saved state whose tensors are each rank's own: for `Checkpointer(..., replicated=True)`.
PER_RANK = ("rng", "trainer")
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_MEMORY = Path("/dev/shm")  # noqa: S108  a folder of our own is made in it


class FastCheckCallback(TrainerCallback):
    """Saves a Trainer's run every so many steps, and resumes it.

    Args:
        checkpointer: by default `Checkpointer()`, whose job is named by the environment. Under data parallelism pass
            one with `replicated=True, per_rank=PER_RANK`.
        every: steps between saves, or a policy from `fastcheck.every`.

    FSDP and DeepSpeed are refused when training begins: the Trainer loads sharded states in its own way.
    """

    def __init__(self, checkpointer: Checkpointer | None = None, *, every: int | Every = 1) -> None:
        self.checkpointer = Checkpointer() if checkpointer is None else checkpointer
        self._due = every if isinstance(every, Every) else policy_of(every)
        self._trainer: Trainer | None = None
        #: Loaded state that is not restored yet, and the folder that the Trainer resumes from.
        self._loaded: dict[str, PlainState] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._saved_step = 0
        self._history: list[str] = []
        #: The generators when the last epoch ended, before anything that the Trainer does at the end of one.
        self._rng_at_epoch_end: dict[str, Any] = {}
        #: Whether what was loaded is of the end of an epoch.
        self._between_epochs = False

    def resume(self, trainer: Trainer) -> str | None:
        """For `trainer.train(resume_from_checkpoint=...)`: the newer of memory and disk; None when there is neither.

        If memory is out of reach, the newest checkpoint on disk counts, with a warning. All ranks call it.
        """
        self._trainer = trainer
        _check(trainer.args)
        disk = _newest_on_disk(Path(str(trainer.args.output_dir)))
        loaded = {name: PlainState() for name in _state_names(_scaler(trainer))}
        step = load_newer(self.checkpointer, loaded, None if disk is None else disk[0])
        if step is None:
            return None if disk is None else str(disk[1])
        self._saved_step = step
        self._loaded = loaded
        self._between_epochs = loaded["trainer"].value["between_epochs"]
        self._folder, path = _make_folder(trainer.model, step, loaded)
        logger.info("resuming step %d of job %s from memory", step, self.checkpointer.job)
        return str(path)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state that the Trainer did not load."""
        _check(args)
        if args.fp16 and self._trainer is None:
            raise InvalidArgumentError(
                "the gradient scaler is the Trainer's: call resume(trainer) before train()"
            )
        for name, target in self._targets(kwargs).items():
            if name in self._loaded:
                target.load_state_dict(self._loaded.pop(name).value)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore generators that were saved between two epochs, before the data is shuffled."""
        if self._between_epochs:
            self._put_generators_back()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Between two steps: restore the generators the first time, save the last step afterwards."""
        self._put_generators_back()
        self._save(state, kwargs, Generators())

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the generators, also when an epoch is cut short: the Trainer may then evaluate, which draws numbers."""
        self._rng_at_epoch_end = Generators().state_dict()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step."""
        if float(state.epoch or 0).is_integer():
            self._save(state, kwargs, Generators(), between_epochs=True)
        else:
            self._save(state, kwargs, PlainState(self._rng_at_epoch_end))

    def _put_generators_back(self) -> None:
        rng = self._loaded.pop("rng", None)
        if rng is not None:
            Generators().load_state_dict(rng.value)
            self._loaded.clear()
            assert self._folder is not None
            self._folder.cleanup()

    def _save(
        self,
        state: TrainerState,
        kwargs: dict[str, Any],
        rng: Generators | PlainState,
        *,
        between_epochs: bool = False,
    ) -> None:
        step = state.global_step
        if step > self._saved_step and self._due(step):
            self._saved_step = step
            saved = {
                "model": kwargs["model"],
                "trainer": PlainState({"json": self._json(state), "between_epochs": between_epochs}),
                "rng": rng,
                **self._targets(kwargs),
            }
            self.checkpointer.save(step, saved)

    def _targets(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The objects whose state is restored when training begins."""
        optimizer = kwargs["optimizer"]
        # Accelerate's wrapper holds the optimizer that FastCheck knows; its own load_state_dict depends on the device.
        found = {"optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": kwargs["lr_scheduler"]}
        scaler = None if self._trainer is None else _scaler(self._trainer)
        return found if scaler is None else {**found, "scaler": scaler}

    def _json(self, state: TrainerState) -> torch.Tensor:
        """trainer_state.json as bytes. Its history only grows: each entry is written once."""
        self._history += [json.dumps(entry) for entry in state.log_history[len(self._history) :]]
        rest = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "log_history"}
        if self._trainer is not None:
            rest["stateful_callbacks"] = _exported(self._trainer)
        text = json.dumps(rest)[:-1] + f', "log_history": [{", ".join(self._history)}]}}'
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _check(args: TrainingArguments) -> None:
    if args.deepspeed or getattr(args, "fsdp", None):
        raise InvalidArgumentError(
            "FastCheckCallback saves what each rank holds whole; this Trainer shards it by FSDP or DeepSpeed. "
            "Save it from a loop of your own, see docs/guides/fsdp2.md"
        )


def _state_names(scaler: Any) -> list[str]:
    return ["model", "trainer", "rng", "optimizer", "scheduler", *([] if scaler is None else ["scaler"])]


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


def _exported(trainer: Trainer) -> dict[str, Any]:
    """The states of callbacks that have one, as the Trainer writes them."""
    found: dict[str, Any] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            found.setdefault(type(one).__name__, []).append(one.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _newest_on_disk(output_dir: Path) -> tuple[int, Path] | None:
    """The newest of the Trainer's own checkpoints that is complete enough to be resumed.

    If the Trainer was killed while it wrote a checkpoint, that one has no state yet and an older one counts.
    transformers' own `get_last_checkpoint` doesn't check this.
    """
    complete = [
        (int(found[1]), path)
        for path in (output_dir.iterdir() if output_dir.is_dir() else ())
        if (found := _CHECKPOINT.fullmatch(path.name)) and (path / TRAINER_STATE_NAME).is_file()
    ]
    return max(complete, default=None)


def _make_folder(
    model: Any, step: int, loaded: dict[str, PlainState]
) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """A folder with a checkpoint for the Trainer: its state and the model, nothing else."""
    model.load_state_dict(loaded.pop("model").value)
    size = sum(p.numel() * p.element_size() for p in [*model.parameters(), *model.buffers()])
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * size
    folder = tempfile.TemporaryDirectory(prefix="fastcheck-resume-", dir=_MEMORY if in_memory else None)
    path = Path(folder.name) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    path.mkdir()
    # Not save_pretrained: it writes on rank 0 alone, and every rank loads from a folder of its own.
    save_model(model, str(path / "model.safetensors"))
    text = loaded.pop("trainer").value["json"]
    (path / TRAINER_STATE_NAME).write_bytes(bytes(text.tolist()))
    return folder, path
