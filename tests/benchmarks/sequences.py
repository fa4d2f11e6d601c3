"""Training whose states the codec is measured on: four small models that really learn, seeded, on the CPU.

Random bits would say nothing about a codec that lives on what training does to numbers. Nothing is downloaded: the
text is the Python standard library's source, the images and the embedding's pairs are drawn from hidden structure that
the models can find. Each kind yields its snapshots as it trains, so that no more than three are in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  the name that every torch program uses
from torch import nn

from fastcheck.copier import Copier
from fastcheck.demo.model import GPT, batch, corpus
from fastcheck.state.flatten import flatten
from fastcheck.state.layouts import Layouts
from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.chunk_plan import parse_layout
from fastcheckd.codec.lossy import quantise

State = dict[str, object]

#: Where pairs begin: the first steps, the middle, the end of training.
STARTS = (10, 200, 600)
STARTS_QUICK = (10, 25)
GAPS = (1, 10)
SEED = 20
LR = 5e-4
WEIGHT_DECAY = 0.1
BATCH, CONTEXT = 8, 64


@dataclass(frozen=True)
class Snapshot:
    """A state as the SDK would stage it, bytes uint8 [state_bytes], and what it says about them."""

    step: int
    bytes: npt.NDArray[np.uint8]
    layout: pb.StateLayout
    #: Byte range [start, stop) of the state header.
    header: tuple[int, int]
    #: Bytes of the caller's tensors, without gaps and header.
    tensor_bytes: int
    loss: float


@dataclass(frozen=True)
class Pair:
    """Two snapshots of one training, and for the log how long the training took until the newer."""

    base: Snapshot
    new: Snapshot
    trained_s: float

    @property
    def gap(self) -> int:
        """Steps between them."""
        return self.new.step - self.base.step


@dataclass(frozen=True)
class Training:
    """What a trainer's loop needs: makes one step and returns its loss; the state as a user would save it."""

    step: Callable[[int], float]
    state: State


@dataclass(frozen=True)
class Sequence:
    """A kind of training and the steps at which pairs begin."""

    name: str
    start: Callable[[int], Training]
    starts: tuple[int, ...]
    gaps: tuple[int, ...] = GAPS


def sequences(quick: bool) -> list[Sequence]:
    """All kinds, in the order of the goals' table."""
    starts = STARTS_QUICK if quick else STARTS
    alone = (starts[1],)
    return [
        Sequence("AdamW, fp32", adamw_fp32, starts),
        Sequence("AdamW, bf16 with fp32 master", adamw_bf16, starts),
        Sequence("SGD with momentum", sgd_images, starts),
        Sequence("bf16 weights alone, lr 5e-4", lambda steps: bf16_weights(5e-4), alone, (1,)),
        Sequence("bf16 weights alone, lr 6e-5", lambda steps: bf16_weights(6e-5), alone, (1,)),
        Sequence("embedding, sparse rows", sparse_embedding, starts),
    ]


def pairs(sequence: Sequence) -> Iterator[Pair]:
    """Train, and hand out each pair as soon as its newer step is there."""
    wanted = {start + gap for start in sequence.starts for gap in (0, *sequence.gaps)}
    torch.manual_seed(SEED)
    training = sequence.start(max(wanted))
    layouts = Layouts()
    layouts.watch(training.state)
    bases: dict[int, Snapshot] = {}
    trained_s = 0.0
    for step in range(1, max(wanted) + 1):
        started = time.perf_counter()
        loss = training.step(step)
        trained_s += time.perf_counter() - started
        if step not in wanted:
            continue
        new = snapshot(step, training.state, layouts, loss)
        if step in sequence.starts:
            bases = {step: new}
        for base in bases.values():
            if step > base.step:
                yield Pair(base, new, trained_s)
    layouts.close()


def snapshot(step: int, state: State, layouts: Layouts, loss: float = 0.0) -> Snapshot:
    """Flatten and copy, as `Checkpointer.save` does it; `layouts` knows the hyper-parameters of the last step."""
    flat = flatten(state, layouts)
    layout = pb.StateLayout()
    layout.CopyFrom(flat.layout)  # the next state gets the same message
    staged = torch.zeros(flat.state_bytes, dtype=torch.uint8)
    copier = Copier(1)
    copier.copy(flat, staged)
    copier.close()
    tensor_bytes = sum(piece.bytes for piece in flat.pieces)
    header = flat.header_offset, flat.header_offset + len(flat.header)
    return Snapshot(step, staged.numpy(), layout, header, tensor_bytes, loss)


def decay_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    """Weight decay for matrices, none for biases and norms."""
    return [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """From the optimizer's lr to a tenth of it."""
    lr = optimizer.param_groups[0]["lr"]
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=lr / 10)


def byte_gpt() -> GPT:
    """3.3 million parameters."""
    return GPT(width=256, heads=4, layers=4, context=CONTEXT, dropout=0.0)


def text_loss(model: nn.Module, text: torch.Tensor, step: int) -> torch.Tensor:
    """Mean cross entropy of the next byte on the step's batch."""
    inputs, targets = batch(text, seed=SEED, step=step, rank=0, size=BATCH, context=CONTEXT)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def adamw_fp32(steps: int) -> Training:
    """The byte GPT in fp32, lr on a cosine."""
    text, model = corpus(), byte_gpt()
    optimizer = torch.optim.AdamW(decay_groups(dict(model.named_parameters())), lr=LR)
    scheduler = cosine(optimizer, steps)

    def step(number: int) -> float:
        loss = text_loss(model, text, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Training(step, {"model": model, "optimizer": optimizer})


def mixed_precision(
    lr: float,
) -> tuple[nn.Module, dict[str, nn.Parameter], torch.optim.AdamW, Callable[[int], float]]:
    """The byte GPT in bf16; AdamW works on fp32 masters, which are rounded into the model after each step."""
    text, model = corpus(), byte_gpt()
    # From fp32, as in earnest: a master that starts as a rounded number has no low bits at first.
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(decay_groups(masters), lr=lr)

    def step(number: int) -> float:
        loss = text_loss(model, text, number)
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        return loss.item()

    return model, masters, optimizer, step


def adamw_bf16(steps: int) -> Training:
    """bf16 parameters, fp32 master and moments, lr on a cosine."""
    model, masters, optimizer, step = mixed_precision(LR)
    scheduler = cosine(optimizer, steps)

    def scheduled(number: int) -> float:
        loss = step(number)
        scheduler.step()
        return loss

    return Training(scheduled, {"model": model, "master": masters, "optimizer": optimizer})


def bf16_weights(lr: float) -> Training:
    """Only the bf16 parameters are saved; lr stays as it is."""
    model, _, _, step = mixed_precision(lr)
    return Training(step, {"model": model})


class Residual(nn.Module):
    """Two convolutions, added to what came in (through a third one where the shape changes)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        same = width_in == width and stride == 1
        self.across = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width_in, height, height] to [batch, width, height / stride, height / stride]."""
        y = self.first_norm(self.first(x)).relu()
        out: torch.Tensor = (self.second_norm(self.second(y)) + self.across(x)).relu()
        return out


CLASSES = 10


def small_resnet() -> nn.Module:
    """2.8 million parameters for images of 16 x 16."""
    widths = [(32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        *(Residual(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, CLASSES),
    )


def sgd_images(steps: int) -> Training:
    """The ResNet on images of ten hidden patterns, shifted at random and under noise; lr on a cosine."""
    patterns = F.interpolate(torch.randn(CLASSES, 3, 4, 4), scale_factor=4.0, mode="bilinear")
    model = small_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = cosine(optimizer, steps)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + number)
        labels = torch.randint(0, CLASSES, (16,), generator=generator)
        shifts = torch.randint(0, 16, (16, 2), generator=generator).tolist()
        images = torch.stack(
            [patterns[k].roll(shift, (1, 2)) for k, shift in zip(labels.tolist(), shifts, strict=True)]
        )
        images += torch.randn(images.shape, generator=generator)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Training(step, {"model": model, "optimizer": optimizer})


ROWS, ROW_WIDTH, TOPICS, LOOKUPS = 30_000, 128, 64, 128


def sparse_embedding(steps: int) -> Training:
    """Rows of the same hidden topic are drawn together, others pushed apart; few rows are touched in a step."""
    table = nn.Embedding(ROWS, ROW_WIDTH, sparse=True)
    nn.init.normal_(table.weight, std=ROW_WIDTH**-0.5)
    model = nn.ModuleDict({"table": table})
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + number)
        # Topic: row modulo TOPICS. A row's frequency falls with its number as a word's with its rank (Zipf).
        left, other = (ROWS ** torch.rand(2, LOOKUPS, generator=generator)).long()
        same = other - other % TOPICS + left % TOPICS
        same = torch.where(same < ROWS, same, left)
        a, b, c = table(left), table(same), table(other)
        loss = F.softplus(-(a * b).sum(1)).mean() + F.softplus((a * c).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training(step, {"model": model, "optimizer": optimizer})


def quantised(snapshot: Snapshot, base: Snapshot | None, precision: pb.Precision) -> Snapshot:
    """The snapshot with what `precision` allows lost; `base` is the lossy snapshot that holders have, if any."""
    layout = pb.StateLayout()
    layout.CopyFrom(snapshot.layout)
    layout.precision.CopyFrom(precision)
    data, start = snapshot.bytes.copy(), 0
    for plan in parse_layout(layout, len(data)):
        place = slice(start, start + plan.bytes)
        quantise(data.data[place], None if base is None else base.bytes.data[place], plan)
        start += plan.bytes
    return replace(snapshot, bytes=data, layout=layout)
