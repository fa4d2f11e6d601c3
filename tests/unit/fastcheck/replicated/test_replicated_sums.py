"""The sum of a tensor: of its bytes alone, wherever they lie, and any bit counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck.replicated import sums

WORDS = sums.ROW_WORDS


def summed(*tensors):
    return sums.digests(tensors).tolist()


@given(st.integers(1, 3 * WORDS * 8), st.integers(0, 2**31), st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_changes_the_sum_and_back_it_is_as_before(size, seed, data):
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    before = summed(tensor)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    tensor[at] ^= 1 << bit
    assert summed(tensor) != before
    tensor[at] ^= 1 << bit
    assert summed(tensor) == before


@pytest.mark.parametrize("count", [5, 3 * WORDS, 40 * WORDS])
def test_two_sign_bits_two_swapped_numbers_and_a_shift_are_found(count):
    tensor = torch.randn(count, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    before = summed(tensor)
    for change in (
        lambda t: t.index_put_((torch.tensor([1, 3]),), -t[[1, 3]]),
        lambda t: t.index_put_((torch.tensor([0, 4]),), t[[4, 0]]),
        lambda t: t.copy_(t.roll(1)),
        lambda t: t.copy_(t.roll(2)),
        lambda t: t.neg_(),
    ):
        changed = tensor.clone()
        change(changed)
        assert summed(changed) != before


def test_words_a_row_apart_do_not_stand_for_each_other():
    tensor = torch.zeros(2 * WORDS, dtype=torch.int64)
    tensor[5] = 77
    other = tensor.roll(WORDS)
    assert summed(tensor) != summed(other)


@given(st.lists(st.integers(0, 70_000), max_size=12), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_a_tensor_has_the_same_sum_whatever_its_place_in_memory_and_its_strides(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    plain = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    shifted = []
    strided = []
    for tensor in plain:
        room = torch.zeros(tensor.numel() + 3, dtype=torch.uint8)
        room[3:] = tensor
        shifted.append(room[3:])
        wide = torch.zeros(tensor.numel(), 2, dtype=torch.uint8)
        wide[:, 0] = tensor
        strided.append(wide[:, 0])
    assert summed(*plain) == summed(*shifted) == summed(*strided)


def test_the_change_of_one_small_tensor_among_many_changes_its_sum_alone():
    tensors = [torch.full((n % 50,), float(n)) for n in range(1000)]
    before = summed(*tensors)
    tensors[321][3] += 1
    after = summed(*tensors)
    assert [n for n in range(1000) if before[n] != after[n]] == [321]


def test_all_dtypes_can_be_summed():
    dtypes = [
        torch.bool,
        torch.int8,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.complex128,
        torch.float64,
    ]
    for dtype in dtypes:
        tensor = torch.ones((3, 5), dtype=dtype)
        other = tensor.clone()
        other[2, 4] = 0
        assert summed(tensor) != summed(other)
        assert summed(torch.ones((), dtype=dtype)) != summed(torch.zeros((), dtype=dtype))


def test_the_digest_of_a_row_of_tensors_depends_on_each_and_on_their_order():
    tensors = [torch.arange(n + 1) for n in range(10)]
    alone = sums.combined(sums.digests(tensors))
    assert len(alone) == 16 and alone == sums.combined(sums.digests([t.clone() for t in tensors]))
    assert alone != sums.combined(sums.digests(tensors[::-1]))
    tensors[9][3] += 1
    assert alone != sums.combined(sums.digests(tensors))
    assert sums.combined(sums.digests([])) != alone


def test_what_the_sum_of_known_bytes_is_never_changes():
    """Ranks of different versions of torch, or of FastCheck, compare their sums."""
    assert summed(torch.arange(100_000, dtype=torch.int32), torch.arange(9, dtype=torch.uint8)) == KNOWN


KNOWN = [6970635962959598969, -7956557869554640916]
