"""Hugging Face's Trainer: each step to other nodes' RAM, every 20 to disk, and on from the newest of both."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from fastcheck import Checkpointer
from fastcheck.integrations.transformers import FastCheckCallback


class Tokens(torch.utils.data.Dataset):
    """Sequences that can be learnt; nothing is downloaded."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (index % 5 + 1) + index) % 61
        return {"input_ids": tokens, "labels": tokens}


class PrintLoss(TrainerCallback):
    """One line per step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """The Trainer logs after each step."""
        if "loss" in logs:
            print("step", state.global_step, "loss", float(logs["loss"]).hex(), flush=True)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
callback = FastCheckCallback(Checkpointer(job="hf"), every=1)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=45,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Tokens(),
    callbacks=[callback, PrintLoss()],
)
resume = callback.resume(trainer)
print("begins after step", resume.rpartition("-")[2] if resume else 0, flush=True)
trainer.train(resume_from_checkpoint=resume)
callback.checkpointer.close()
