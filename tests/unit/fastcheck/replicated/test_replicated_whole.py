"""Parts that ranks saved, put together as the data process does it, fill a state exactly; others are refused."""

import copy
from typing import Any

import pytest
import torch

from fastcheck.copier import Copier
from fastcheck.errors import CorruptError, InvalidArgumentError
from fastcheck.replicated.sharing import SharedSaves
from fastcheck.replicated.whole import parse_shared
from fastcheck.segments import anonymous
from fastcheck.state.fill import fill
from fastcheck.state.layouts import Layouts
from fastcheck_proto.v1 import trainer_pb2 as pb

PAGE = 4096


def train_state(rank: int = 0, seed: int = 0) -> dict[str, Any]:
    """Alike on all ranks but for what is per rank: small and large tensors, an optimizer, odd strides, aliases."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.Tanh(), torch.nn.Linear(700, 2500))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    lone = torch.randn(3_000_000)
    return {
        "model": model,
        "optimizer": optimizer,
        "lone": lone,
        "same": lone,
        "strided": torch.randn(900, 1300).t(),
        "empty": torch.empty(0, 3),
        "flags": torch.rand(1001) > 0.5,
        "rng": {"cpu": torch.full((5000,), rank, dtype=torch.uint8), "n": rank},
        "sampler": {"position": rank * 1000, "seen": [rank]},
    }


class Ranks:
    """All ranks' saves of one step, gathered."""

    def __init__(self, states: list[Any], compare: str = "all", per_rank: tuple[str, ...] = ("rng",)) -> None:
        self.flats = []
        for rank, state in enumerate(states):
            saves = SharedSaves(rank, len(states), per_rank, compare)
            flat, shared = saves.flatten(state, Layouts())
            self.flats.append(saves.compared(flat, shared, 7))

    def ready(self, rank: int) -> tuple[bytes, pb.LoadReady, torch.Tensor]:
        header_rank = rank if rank < len(self.flats) else 0
        ready = pb.LoadReady(step=7, header_rank=header_rank)
        at = 0
        for flat in self.flats:
            ready.parts.add(offset=at, bytes=flat.state_bytes, shared=flat.shared)
            at += -(-flat.state_bytes // PAGE) * PAGE
        ready.state_bytes = at
        segment = anonymous(at)
        segment.tensor.fill_(0x5A)
        for flat, part in zip(self.flats, ready.parts, strict=True):
            Copier(1).copy(flat, segment.tensor[part.offset : part.offset + part.bytes])
        return self.flats[header_rank].header, ready, segment.tensor

    def load(self, rank: int, into: Any) -> None:
        data, ready, segment = self.ready(rank)
        fill(into, parse_shared(data, ready), segment)


def assert_shared_alike(one: Any, other: Any) -> None:
    for key in ("lone", "strided", "flags"):
        assert torch.equal(one[key], other[key]), key
    for a, b in zip(one["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(
        one["optimizer"].state_dict()["state"].values(),
        other["optimizer"].state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(a[key], b[key]) for key in ("exp_avg", "exp_avg_sq", "step"))


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_any_rank_gets_the_whole_state_and_its_own_values(ranks):
    states = [train_state(rank) for rank in range(ranks)]
    saved = Ranks(states, "off")
    sizes = [flat.shared.stop - flat.shared.start for flat in saved.flats]
    assert sum(sizes) == saved.flats[0].shared.shared_bytes
    assert max(sizes) - min(sizes) <= 2 * (4 << 20)
    for rank in (0, ranks - 1, ranks + 2):
        found = train_state(99, seed=5)
        saved.load(rank, found)
        assert_shared_alike(found, states[0])
        own = rank if rank < ranks else 0
        assert found["rng"]["cpu"].unique().tolist() == [own] and found["rng"]["n"] == own
        assert found["sampler"] == {"position": own * 1000, "seen": [own]}


def test_more_ranks_than_chunks_leave_some_with_nothing_but_their_own():
    states = [{"w": torch.arange(10.0), "rng": torch.tensor([rank])} for rank in range(5)]
    saved = Ranks(states)
    assert sorted(flat.shared.stop - flat.shared.start for flat in saved.flats)[:4] == [0] * 4
    for rank in range(5):
        found = {"w": torch.zeros(10), "rng": torch.zeros(1, dtype=torch.int64)}
        saved.load(rank, found)
        assert torch.equal(found["w"], states[0]["w"]) and int(found["rng"]) == rank


def test_ranks_that_hold_the_same_send_the_same_layout_and_digests_and_one_that_does_not_differs():
    states = [train_state(rank) for rank in range(3)]
    alike = Ranks(states)
    assert len({flat.shared.layout_digest for flat in alike.flats}) == 1
    found = [[(d.part, d.digest) for d in flat.shared_digests] for flat in alike.flats]
    assert found[0] == found[1] == found[2] and [part for part, _ in found[0]] == [0, 1, 2]
    states[1]["flags"][1000] ^= True
    other = Ranks(states)
    differ = [
        mine.part
        for mine, usual in zip(other.flats[1].shared_digests, other.flats[0].shared_digests, strict=True)
        if mine.digest != usual.digest
    ]
    assert len(differ) == 1
    assert other.flats[0].shared_digests == other.flats[2].shared_digests


def test_in_pairs_each_rank_reads_two_parts_and_off_reads_none():
    states = [train_state(rank) for rank in range(3)]
    looked_at = [part.part for flat in Ranks(states, "pairs").flats for part in flat.shared_digests]
    assert sorted(looked_at) == [0, 0, 1, 1, 2, 2]
    assert not any(flat.shared_digests for flat in Ranks(states, "off").flats)


def test_another_shape_dtype_or_name_is_another_layout():
    def digest(state: Any) -> bytes:
        return bytes(Ranks([state], per_rank=("own",)).flats[0].shared.layout_digest)

    plain = {"w": torch.zeros(4, 2), "own": torch.zeros(3)}
    assert digest(plain) == digest(copy.deepcopy(plain))
    assert digest(plain) == digest(plain | {"own": torch.zeros(9)})
    others = [
        {"w": torch.zeros(2, 4), "own": torch.zeros(3)},
        {"w": torch.zeros(4, 2, dtype=torch.int32), "own": torch.zeros(3)},
        {"v": torch.zeros(4, 2), "own": torch.zeros(3)},
    ]
    assert len({digest(plain), *map(digest, others)}) == 4


def test_a_tensor_that_another_key_leads_to_is_shared():
    tensor = torch.arange(5.0)
    saved = Ranks([{"model": tensor, "rng": tensor}, {"model": tensor, "rng": tensor}])
    found = {"model": torch.zeros(5), "rng": torch.zeros(5)}
    saved.load(1, found)
    assert torch.equal(found["rng"], tensor)


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        ("a part less", lambda ready: ready.parts.pop()),
        ("a header of nobody", lambda ready: setattr(ready, "header_rank", 9)),
        ("another cut", lambda ready: setattr(ready.parts[1].shared, "start", 64)),
        ("a part with too few bytes", lambda ready: setattr(ready.parts[0], "bytes", 8)),
        ("another size of the whole", lambda ready: setattr(ready.parts[0].shared, "shared_bytes", 64)),
    ],
)
def test_parts_that_are_not_those_of_the_header_are_refused(what, damage):
    data, ready, _ = Ranks([{"w": torch.zeros(3_000_000)} for _ in range(3)], "off").ready(0)
    parse_shared(data, ready)
    damage(ready)
    with pytest.raises(CorruptError):
        parse_shared(data, ready)


@pytest.mark.parametrize("arguments", [{"compare": "some"}, {"per_rank": "rng"}, {"per_rank": ("",)}])
def test_arguments_that_cannot_be_meant_are_refused(arguments):
    with pytest.raises(InvalidArgumentError):
        SharedSaves(**({"rank": 0, "world_size": 2, "per_rank": (), "compare": "all"} | arguments))
