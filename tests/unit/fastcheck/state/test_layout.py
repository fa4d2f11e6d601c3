"""Layouts: chunks tile the state, units never part, every byte has one place; and tensors in pieces come back."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fastcheck.state_bytes import bits, same, snapshot

from fastcheck import CorruptError
from fastcheck.copier import Copier
from fastcheck.state import layout
from fastcheck.state.flatten import FlatState, flatten
from fastcheck.state.header import parse
from fastcheck.state.layout import Arrangement, Extent, Group, Member, arrange, piece_elements
from fastcheck.state.layouts import KEPT_MAX, Layouts
from fastcheck.state.tensors import DTYPES
from fastcheck_proto.conventions import LAYOUT_CHUNK_BYTES, LAYOUT_SCHEMA
from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheck_proto.v1 import state_pb2

CHUNK = 1 << 16
ROLES = [pb.ROLE_PARAM, pb.ROLE_EXP_AVG, pb.ROLE_EXP_AVG_SQ, pb.ROLE_LOW_PRECISION_PARAM]
SIZES = {"uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4, "int64": 8, "float64": 8}


def itemsize(run: pb.Run) -> int:
    return getattr(torch, run.dtype).itemsize


def check_chunks(chunks, limit: int) -> None:
    """What any reader of a layout may rely on."""
    for chunk in chunks:
        assert 0 < chunk.bytes <= limit
        end = 0
        units = defaultdict(list)
        for run in chunk.runs:
            assert run.offset % 64 == 0
            assert run.offset >= end
            assert run.elements > 0
            end = run.offset + run.elements * itemsize(run)
            assert not run.row_elements or run.elements % run.row_elements == 0
            if run.unit:
                units[run.unit].append(run)
        assert end <= chunk.bytes
        assert set(units) == set(range(1, len(units) + 1))
        for runs in units.values():
            assert len(runs) > 1
            assert len({run.elements for run in runs}) == 1


def check_arrangement(made: Arrangement, extents: list[Extent], groups: list[Group], limit: int) -> None:
    check_chunks(made.layout.chunks, limit)
    assert made.layout.schema == LAYOUT_SCHEMA
    assert made.chunks == len(made.layout.chunks)
    assert sum(chunk.bytes for chunk in made.layout.chunks) == made.end
    # Every byte of every tensor has one place, none two.
    end = 0
    sizes: dict[int, int] = defaultdict(int)
    for part in made.parts:
        assert part.offset % 64 == 0
        assert part.offset >= end
        end = part.offset + part.bytes
        sizes[part.slot] += part.bytes
    assert end <= made.end
    assert sizes == {slot: e.bytes for slot, e in enumerate(extents) if e.bytes}
    for slot, place in enumerate(made.places):
        mine = [part for part in made.parts if part.slot == slot]
        if place.piece_offsets:
            assert [part.offset for part in mine] == list(place.piece_offsets)
            assert {part.bytes for part in mine[:-1]} == {place.piece_bytes}
            assert 0 < mine[-1].bytes <= place.piece_bytes
            assert place.piece_bytes % extents[slot].itemsize == 0
        elif mine:
            assert [(part.offset, part.bytes) for part in mine] == [(place.offset, extents[slot].bytes)]
    # The same elements of a group's members lie in the same chunk.
    starts = [0]
    for chunk in made.layout.chunks:
        starts.append(starts[-1] + chunk.bytes)
    for group in groups:
        chunks = []
        for member in group.members:
            mine = [part for part in made.parts if part.slot == member.slot]
            chunks.append([max(i for i, s in enumerate(starts) if s <= part.offset) for part in mine])
        members = [extents[m.slot] for m in group.members]
        small = sum(layout.align(extent.bytes) for extent in members) <= limit
        if small or piece_elements(members):
            assert all(c == chunks[0] for c in chunks)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return draw(
        st.one_of(
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.tuples(st.integers(1, 40_000)),
            st.tuples(st.integers(1, 300), st.integers(1, 300)),
            st.tuples(st.integers(1, 4), st.integers(1, 30_000)),
        )
    )


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Extent], list[Group]]:
    extents: list[Extent] = []
    groups: list[Group] = []
    for _ in range(draw(st.integers(0, 8))):
        shape = draw(shapes())
        members = []
        for _ in range(draw(st.integers(1, 4))):
            dtype = draw(st.sampled_from(sorted(SIZES)))
            other = (math.prod(shape),) if draw(st.booleans()) and draw(st.booleans()) else shape
            extents.append(Extent(dtype, other, draw(st.booleans()) or draw(st.booleans())))
            members.append(Member(len(extents) - 1, draw(st.sampled_from(ROLES))))
        if draw(st.booleans()):
            groups.append(Group(tuple(members), draw(st.integers(0, 3))))
    return extents, groups


@settings(max_examples=200, deadline=None)
@given(states())
def test_any_layout_tiles_the_state_and_parts_no_unit(case):
    extents, groups = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LAYOUT_CHUNK_BYTES", CHUNK)
        made = arrange(extents, groups)
        check_arrangement(made, extents, groups, CHUNK)
        again = arrange(extents, groups)
    assert (again.places, again.parts, again.layout) == (made.places, made.parts, made.layout)


def group_of(count: int) -> list[Group]:
    return [Group(tuple(Member(slot, ROLES[slot]) for slot in range(count)), 1)]


def test_a_large_group_is_cut_alike_into_as_few_equal_pieces_as_possible():
    extents = [Extent("float32", (3_000_000,), True)] * 3
    made = arrange(extents, group_of(3))
    check_arrangement(made, extents, group_of(3), LAYOUT_CHUNK_BYTES)
    assert len(made.layout.chunks) == 9
    assert made.piece_elements[0] % 1024 == 0
    first = made.layout.chunks[0]
    assert [run.role for run in first.runs] == ROLES[:3]
    assert {run.unit for run in first.runs} == {1}
    assert {run.optimizer_step for run in first.runs} == {1}
    assert max(c.bytes for c in made.layout.chunks) - made.layout.chunks[-2].bytes == 0


@pytest.mark.parametrize(("row", "whole"), [(1000, True), (4096, True), (5000, False)])
def test_pieces_are_whole_rows_where_rows_are_short(row, whole):
    extents = [Extent("float32", (3000, row), True)] * 3
    made = arrange(extents, group_of(3))
    check_arrangement(made, extents, group_of(3), LAYOUT_CHUNK_BYTES)
    assert (made.piece_elements[0] % row == 0) is whole
    assert {run.row_elements for run in made.layout.chunks[1].runs} == {row if whole else 0}


def test_a_strided_member_is_cut_by_rows_however_long_they_are():
    extents = [Extent("float32", (64, 50_000), True), Extent("float32", (64, 50_000), False)]
    assert arrange(extents, group_of(2)).piece_elements[0] % 50_000 == 0
    too_long = [Extent("float32", (2, 3_000_000), True), Extent("float32", (2, 3_000_000), False)]
    made = arrange(too_long, group_of(2))
    check_arrangement(made, too_long, [], LAYOUT_CHUNK_BYTES)
    assert not made.piece_elements
    assert {run.unit for chunk in made.layout.chunks for run in chunk.runs} == {0}
    assert {run.role for chunk in made.layout.chunks for run in chunk.runs} == set(ROLES[:2])


def test_a_large_lone_tensor_stays_in_one_piece_and_is_cut_at_rows():
    extents = [Extent("float32", (100,), True), Extent("float32", (50_000, 100), True)]
    made = arrange(extents, [])
    check_arrangement(made, extents, [], LAYOUT_CHUNK_BYTES)
    runs = [run for chunk in made.layout.chunks for run in chunk.runs if run.row_elements]
    assert len(runs) == 5
    assert {run.row_elements for run in runs} == {100}
    assert not made.places[1].piece_offsets


def test_small_tensors_fill_a_chunk_whatever_large_ones_come_between():
    extents = [Extent("float32", (10,), True), *[Extent("float32", (2_000_000,), True)] * 2] * 3
    pairs = [Group((Member(i + 1, ROLES[0]), Member(i + 2, ROLES[1]))) for i in (0, 3, 6)]
    made = arrange(extents, pairs)
    check_arrangement(made, extents, pairs, LAYOUT_CHUNK_BYTES)
    small = [c for c in made.layout.chunks if c.bytes < 1000]
    assert [len(c.runs) for c in small] == [3]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_runs_that_cover_it(name):
    tensor = torch.zeros(6 * DTYPES[name].itemsize, dtype=torch.uint8).view(DTYPES[name])
    (run,) = flatten({"t": tensor}).layout.chunks[0].runs
    wanted = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
    known = name in {
        *wanted.values(),
        "bfloat16",
        *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)),
    }
    assert run.dtype == wanted.get(name, name if known else "uint8")
    assert run.elements * itemsize(run) == 6 * DTYPES[name].itemsize


def check_flat(flat: FlatState, limit: int = LAYOUT_CHUNK_BYTES) -> None:
    check_chunks(flat.layout.chunks, limit)
    assert sum(chunk.bytes for chunk in flat.layout.chunks) == flat.state_bytes
    assert (flat.state_bytes - flat.header_offset) % 4096 == 0
    position = 0
    for chunk in flat.layout.chunks:
        assert not (position >= flat.header_offset and chunk.runs)
        assert not position < flat.header_offset < position + chunk.bytes
        position += chunk.bytes


def test_the_header_has_chunks_of_its_own_and_its_growth_moves_nothing():
    flat = flatten({"t": torch.ones(3), "n": 9})
    check_flat(flat)
    assert [c.bytes for c in flat.layout.chunks] == [64, 4096]
    more = flatten({"t": torch.ones(3), "n": 10})
    assert more.state_bytes == flat.state_bytes
    large = flatten({"t": torch.ones(3), "b": bytes(LAYOUT_CHUNK_BYTES + 5)})
    check_flat(large)
    assert [c.bytes for c in large.layout.chunks] == [64, LAYOUT_CHUNK_BYTES, 4096]
    assert flatten({}).state_bytes == 4096


def make_adam(shape, dtype=torch.float32, low=False, strided=False):
    """A model and an optimizer's state dict in plain dicts, everything random."""
    torch.manual_seed(len(shape))
    size = shape[::-1] if strided else shape

    def one():
        made = torch.randn(size, dtype=dtype)
        return made.permute(*reversed(range(len(shape)))) if strided else made

    state = {0: {"step": torch.tensor(3.0), "exp_avg": one(), "exp_avg_sq": one()}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False, "params": [0]}]
    found = {"model": {"w": one()}, "optimizer": {"state": state, "param_groups": groups}}
    if low:
        found["model"]["unrelated"] = torch.randn(7)
    return found


def zeroed(tree):
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {k: zeroed(v) for k, v in tree.items()}
    return [zeroed(v) for v in tree] if isinstance(tree, list) else tree


@settings(max_examples=60, deadline=None)
@given(
    shapes().filter(lambda s: math.prod(s) > 1),
    st.sampled_from([torch.float32, torch.float64, torch.complex64]),
    st.booleans(),
)
def test_cut_tensors_come_back_bit_for_bit_into_targets_of_any_stride(shape, dtype, strided):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LAYOUT_CHUNK_BYTES", CHUNK)
        state = make_adam(shape, dtype, strided=strided)
        check_flat(flatten(state), CHUNK)
        kept = snapshot(state)
    for target in (zeroed(state), zeroed(make_adam(shape, dtype, strided=not strided))):
        kept.fill(target)
        assert bits(target["model"]["w"]) == bits(state["model"]["w"])
        for name, value in state["optimizer"]["state"][0].items():
            assert bits(target["optimizer"]["state"][0][name]) == bits(value)


@st.composite
def training_states(draw: st.DrawFn) -> dict:
    """Parameters and moments of random shapes, dtypes and strides, some shared, some alone, as plain dicts."""
    torch.manual_seed(draw(st.integers(0, 1000)))

    def tensor(shape, dtype):
        made = torch.randn(shape[::-1]).to(dtype).permute(tuple(reversed(range(len(shape)))))
        return made if draw(st.integers(0, 3)) == 0 else made.contiguous()

    floats = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
    model: dict = {}
    moments: dict = {}
    for key in range(draw(st.integers(1, 4))):
        shape = draw(shapes())
        model[f"w{key}"] = tensor(shape, draw(floats))
        if draw(st.booleans()):
            model[f"tied{key}"] = model[f"w{key}"]
        names = draw(st.sets(st.sampled_from(["exp_avg", "exp_avg_sq", "other"])))
        moments[f"w{key}"] = {name: tensor(shape, draw(floats)) for name in sorted(names)}
        moments[f"w{key}"]["step"] = torch.tensor(1.0)
    groups = [{"params": list(moments), "lr": 0.1}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "n": 5}


@settings(max_examples=60, deadline=None)
@given(training_states())
def test_any_training_state_comes_back_bit_for_bit(state):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LAYOUT_CHUNK_BYTES", CHUNK)
        flat = flatten(state)
        check_flat(flat, CHUNK)
        kept = snapshot(state)
    target = zeroed(state)
    kept.fill(target)
    kept.scribble()
    assert same(target, state)


def test_a_large_state_is_cut_and_comes_back_into_strange_targets():
    state = make_adam((1500, 1000))
    flat = flatten(state)
    header = parse(flat.header, flat.state_bytes)
    cut = {r.name for r in header.tensors if r.piece_offsets}
    assert cut == {"model.w", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"}
    kept = snapshot(state)
    wanted = bits(state["model"]["w"])
    under = torch.zeros(1500, 1000, dtype=torch.complex64)
    for w in (
        torch.zeros(1000, 1500).t(),
        torch.zeros(1500, 2000)[:, ::2],
        torch._neg_view(torch.zeros(1500, 1000)),
        under.real,
        torch.nn.Parameter(torch.zeros(1500, 1000)),
    ):
        target = zeroed(state)
        target["model"]["w"] = w
        kept.fill(target)
        assert bits(w) == wanted
    with pytest.raises(ValueError, match="expanded"):
        target = zeroed(state)
        target["model"]["w"] = torch.zeros(1, 1000).expand(1500, 1000)
        kept.fill(target)


def test_memory_shared_here_must_hold_one_value_also_when_cut():
    kept = snapshot(make_adam((1500, 1000)))
    target = zeroed(make_adam((1500, 1000)))
    target["model"]["w"] = target["optimizer"]["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="shares its memory"):
        kept.fill(target)
    assert not target["model"]["w"].any()


class Own(torch.nn.Module):
    """Clears its parameter before it looks at what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1500, 1000))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        with torch.no_grad():
            self.weight.zero_()
            self.weight += state_dict[prefix + "weight"]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(1000, 1500), Own])
def test_modules_with_cut_parameters_are_filled_in_place(make, swap):
    torch.manual_seed(1)
    net = make()
    with torch.no_grad():
        net.weight.normal_()
    optimizer = torch.optim.AdamW(net.parameters())
    net.weight.grad = torch.randn_like(net.weight)
    optimizer.step()
    kept = snapshot({"m": net, "o": optimizer})
    again = make()
    held = again.weight
    other = torch.optim.AdamW(again.parameters())
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        kept.fill({"m": again, "o": other})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    kept.scribble()
    assert again.weight is held
    assert bits(again.weight) == bits(net.weight)
    assert same(other.state_dict(), optimizer.state_dict())


def test_a_segment_that_was_used_before_leaves_nothing_between_tensors():
    state = make_adam((700, 300)) | {"odd": torch.ones(3, dtype=torch.uint8)}
    kept = snapshot(state)
    flat = flatten(state)
    clean = torch.zeros(flat.state_bytes, dtype=torch.uint8)
    Copier(1).copy(flat, clean)
    assert torch.equal(kept.segment.tensor[: flat.state_bytes], clean)


def test_the_same_structure_is_laid_out_once_and_only_steps_change():
    layouts = Layouts()
    state = make_adam((20, 10))
    first = flatten(state, layouts)
    assert [s.step for s in first.layout.optimizer_steps] == [3]
    before = first.layout.SerializeToString()
    (known,) = layouts._known.values()
    state["optimizer"]["state"][0]["step"] += 1
    second = flatten(state, layouts)
    assert list(layouts._known.values()) == [known]
    assert [s.step for s in second.layout.optimizer_steps] == [4]
    assert flatten(make_adam((20, 10))).layout.SerializeToString() == before
    for size in range(KEPT_MAX + 3):
        flatten(make_adam((30, 10 + size)), layouts)
    assert len(layouts._known) == KEPT_MAX


def test_a_header_that_grows_and_shrinks_keeps_the_cached_layout_whole():
    layouts = Layouts()
    for size in (0, LAYOUT_CHUNK_BYTES, 10, 5000):
        check_flat(flatten({"t": torch.ones(9), "b": bytes(size)}, layouts))


def test_a_state_whose_optimizer_cannot_be_understood_is_saved_all_the_same(caplog):
    class Strange(dict):
        def get(self, key, default=None):
            raise RuntimeError(key)

    state = {"o": Strange(make_adam((3, 4))["optimizer"]), "n": 1}
    layouts = Layouts()
    for _ in range(2):
        flat = flatten(state, layouts)
        check_flat(flat)
        assert [p.bytes for p in flat.pieces] == [4, 48, 48]
    assert len(caplog.records) == 1


CUT = {"name": "t", "dtype": "float32", "shape": [40], "offset": 64, "bytes": 160}
GOOD = {"piece_offsets": [64, 256, 128], "piece_bytes": 64}


def cut_header(**record: object) -> bytes:
    return state_pb2.StateHeader(
        schema=2,
        root=state_pb2.StateValue(tensor=0),
        tensors=[state_pb2.TensorRecord(**(CUT | GOOD | record))],
    ).SerializeToString()


def test_the_sample_of_pieces_is_good():
    assert list(parse(cut_header(), 320).tensors[0].piece_offsets) == [64, 256, 128]


@pytest.mark.parametrize(
    "record",
    [
        {"piece_bytes": 0},
        {"piece_offsets": []},
        {"piece_offsets": [64], "piece_bytes": 160},
        {"piece_offsets": [64, 256]},
        {"piece_offsets": [64, 256, 128, 192]},
        {"piece_offsets": [128, 256, 64]},
        {"piece_offsets": [64, 257, 128]},
        {"piece_offsets": [64, 320, 128]},
        {"piece_offsets": [64, 128, 320]},
        {"piece_offsets": [64, 2**64 - 64, 128]},
        {"piece_bytes": 2**64 - 1},
        {"piece_bytes": 62},
        {"piece_bytes": 80, "piece_offsets": [64, 128, 192]},
    ],
)
def test_pieces_that_contradict_their_tensor_or_the_state_are_refused(record):
    with pytest.raises(CorruptError):
        parse(cut_header(**record), 320)
