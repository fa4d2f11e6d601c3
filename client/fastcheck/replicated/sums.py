"""64 bits for a tensor's bytes, computed where the tensor is, with what torch has everywhere; 128 for a row of them.

Rows of 4,096 words of 64 bits are folded into one word each, and those again, until one is left. A word counts with its
value times an odd number and its upper half times another, modulo 2^64, so that any single flipped bit changes the
sum, the topmost included. It finds accidents; whoever wants to be missed can be.

The result depends on bytes alone, not on device or dtype: ranks of different hardware can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch

from ..copier import contiguous_bytes
from ..state.tensors import carrier

WORD_BYTES = 8
COMBINED_BYTES = 16
ROW_WORDS = 4096
#: Rows that are folded at once: what is in between stays in a core's cache, or keeps a GPU busy.
_ROWS_AT_ONCE = {"cpu": 16}
_ROWS_AT_ONCE_ELSEWHERE = 1024
#: Tensors of up to a row are folded together: ten thousand of them would take ten thousand times a dozen calls.
_BATCH_WORDS = 1 << 18


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One int64 for each tensor, on the CPU. They are neither conjugated nor negated lazily."""
    found: list[torch.Tensor] = []
    batch: list[torch.Tensor] = []
    words = 0
    for tensor in tensors:
        data = _bytes(tensor)
        size = -(-data.numel() // WORD_BYTES)
        small = size <= ROW_WORDS
        if batch and (not small or words + size > _BATCH_WORDS):
            found.append(_batch(batch))
            batch, words = [], 0
        if small:
            batch.append(data)
            words += size
        else:
            found.append(_fold(_words(data)).reshape(1))
    if batch:
        found.append(_batch(batch))
    if len({each.device for each in found}) > 1:
        found = [each.cpu() for each in found]
    return torch.cat(found).cpu() if found else torch.empty(0, dtype=torch.int64)


def combined(found: torch.Tensor) -> bytes:
    """Digests of tensors, in order, as one of 16 bytes."""
    combining = hashlib.blake2b(digest_size=COMBINED_BYTES)
    for data in contiguous_bytes(found, max(1, found.numel() * WORD_BYTES)):
        combining.update(data)
    return combining.digest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return carrier(tensor.detach()).reshape(-1).contiguous().view(torch.uint8)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as words; the last one is filled up with zeros."""
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    body = data[:whole]
    if body.storage_offset() % WORD_BYTES:
        body = body.clone()
    words = body.view(torch.int64)
    if whole == data.numel():
        return words
    last = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=data.device)
    last[: data.numel() - whole] = data[whole:]
    # Appending would copy everything: what is full is folded first.
    rows = words.numel() // ROW_WORDS * ROW_WORDS
    rest = torch.cat([words[rows:], last.view(torch.int64)])
    return torch.cat([_rows(words[:rows]), _rows(rest)]) if rows else rest


def _fold(words: torch.Tensor) -> torch.Tensor:
    """All words as one."""
    while words.numel() > 1:
        words = _rows(words)
    return words.reshape(())


def _rows(words: torch.Tensor) -> torch.Tensor:
    """One word for each row; the last row may be short."""
    low, high = _weights(words.device)
    at_once = ROW_WORDS * _ROWS_AT_ONCE.get(words.device.type, _ROWS_AT_ONCE_ELSEWHERE)
    full = words.numel() // ROW_WORDS * ROW_WORDS
    found = []
    for start in range(0, full, at_once):
        block = words[start : min(start + at_once, full)].view(-1, ROW_WORDS)
        scratch = block * low
        sums = scratch.sum(dim=1)
        torch.bitwise_right_shift(block, 32, out=scratch)
        found.append(sums + scratch.mul_(high).sum(dim=1))
    if rest := words.numel() - full:
        block = words[full:]
        found.append((block * low[:rest] + (block >> 32) * high[:rest]).sum().reshape(1))
    return torch.cat(found) if found else words


def _batch(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums of several small tensors: differences of one running sum over all of them."""
    device = batch[0].device
    padding = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=device)
    laid: list[torch.Tensor] = []
    ends = [0]
    for data in batch:
        laid.append(data.to(device))
        if short := -data.numel() % WORD_BYTES:
            laid.append(padding[:short])
        ends.append(ends[-1] + (data.numel() + short) // WORD_BYTES)
    words = torch.cat(laid).view(torch.int64)
    low, high = _weights(device)
    times = -(-words.numel() // ROW_WORDS)
    products = words * low.repeat(times)[: words.numel()]
    products += (words >> 32) * high.repeat(times)[: words.numel()]
    running = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), products.cumsum(0)])
    at = running[torch.tensor(ends, device=device)]
    return at[1:] - at[:-1]


@cache
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd numbers without a pattern, the same on every rank: splitmix64, as torch's generators may change."""
    numbers = []
    state = 0
    for _ in range(2 * ROW_WORDS):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed = (mixed ^ (mixed >> 31)) | 1
        numbers.append(mixed - 2**64 if mixed >= 2**63 else mixed)
    both = torch.tensor(numbers, dtype=torch.int64)
    return both[:ROW_WORDS].to(device), both[ROW_WORDS:].to(device)
