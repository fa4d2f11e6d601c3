"""A rank of a Hugging Face Trainer's run; see test_resuming_frameworks.py."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from tests.cluster.resuming import Rank, newest_in
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from fastcheck.integrations.transformers import PER_RANK, FastCheckCallback

STEPS_PER_EPOCH = 6


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that can be learnt; nothing is downloaded."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (index % 5 + 1) + index) % 13
        return {"input_ids": tokens, "labels": tokens}


class Telling(Trainer):
    """Tells each step's loss."""

    told: Rank

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        self.told.tell(step=self.state.global_step + 1, loss=loss.item().hex())
        return loss


class Ending(TrainerCallback):
    """Ends the run where the test wants it. Comes after the callback that saves."""

    def __init__(self, rank: Rank, saving: FastCheckCallback) -> None:
        self._rank = rank
        self._newest = lambda: newest_in(saving.checkpointer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rank.kill_if("killed", state.global_step, self._newest)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rank.kill_if("validating", state.global_step, self._newest)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._rank.stop_if(state.global_step):
            control.should_training_stop = True


def train(rank: Rank) -> None:
    """Three epochs of six steps with dropout, and a validation after each."""
    if rank.world_size > 1:
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    shared = {"replicated": True, "per_rank": PER_RANK} if rank.world_size > 1 else {}
    saving = FastCheckCallback(rank.checkpointer(**shared), every=1)
    trainer = Telling(
        model=model,
        args=TrainingArguments(
            output_dir=str(rank.out.parent / "hf"),
            num_train_epochs=3,
            per_device_train_batch_size=4 // rank.world_size,
            per_device_eval_batch_size=4 // rank.world_size,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if rank.world_size > 1 else None,
            seed=rank.rank,
            data_seed=5,
            **rank.options,
        ),
        train_dataset=Tokens(4 * STEPS_PER_EPOCH),
        eval_dataset=Tokens(8),
        callbacks=[saving, Ending(rank, saving)],
    )
    trainer.told = rank
    resume = saving.resume(trainer)
    rank.tell(begins=int(resume.rpartition("-")[2]) if resume else 0)
    trainer.train(resume_from_checkpoint=resume)
    rank.tell_end(model)
    rank.close(saving.checkpointer)
