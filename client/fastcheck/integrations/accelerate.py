"""Accelerate: the objects that an Accelerator prepared, as a state for `Checkpointer.save` and `load`.

    ckpt = Checkpointer(job="gpt")
    state = accelerator_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step = ckpt.load(state)
    ...
    ckpt.save(step, state)

In place of `accelerator.save_state(folder)` and `load_state(folder)`, beside which it works: call both, at intervals of
their own. The objects inside the wrappers are saved, so the keys are the model's own, with or without DDP, and the
codec knows the optimizer.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from ..errors import UnsupportedStateError
from ..resume import run_state


def accelerator_state(
    accelerator: Accelerator,
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    loader: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """A state of prepared objects, the scaler and the random generators, for this rank.

    Args:
        loader: a loader with a position that was *not* prepared, such as torchdata's `StatefulDataLoader`, with its
            `StatefulDistributedSampler` for several ranks. A prepared one forgets how it had shuffled the epoch: it is
            refused.
        more: further values and objects of yours, by key.

    Raises:
        UnsupportedStateError: DeepSpeed or Megatron keep the state elsewhere; the loader was prepared, or has no
            position.
    """
    kind = str(accelerator.distributed_type)
    if "DEEPSPEED" in kind or "MEGATRON" in kind:
        raise UnsupportedStateError(f"under {kind} the optimizer's state is not in the prepared objects")
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    schedule = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    if isinstance(loader, DataLoaderStateMixin):
        raise UnsupportedStateError(
            "a loader that accelerator.prepare() returned draws another order of the data when it is loaded: leave it "
            "out of prepare() and use torchdata's StatefulDataLoader, or leave it out of the state and use "
            "accelerator.skip_first_batches"
        )
    return {
        "model": accelerator.unwrap_model(model),
        "optimizer": inner,
        **more,
        **run_state(scheduler=schedule, scaler=accelerator.scaler, loader=loader),
    }
