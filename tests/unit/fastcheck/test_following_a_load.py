"""What the SDK makes of a load's news, and how it fills a state on several threads."""

import threading

import pytest
import torch
from fake_daemon import FakeDaemon

import fastcheck.segments
import fastcheck.shared_memory
from fastcheck import Checkpointer, LoadProgress
from fastcheck_proto.v1 import trainer_pb2 as pb

PROGRESS = [
    pb.LoadProgress(bytes_done=1, bytes_total=4, bytes_per_s=8, holders=1),
    pb.LoadProgress(bytes_done=3, bytes_total=4, bytes_per_s=9, holders=2),
]


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture(params=["shared memory", "streams"])
def ckpt(request, daemon):
    address = daemon.address if request.param == "shared memory" else daemon.tcp_address
    with Checkpointer(job="gpt", address=address) as ckpt:
        yield ckpt


@pytest.fixture
def near(daemon):
    with Checkpointer(job="gpt", address=daemon.address) as ckpt:
        yield ckpt


def state(value=0.0):
    return {"w": torch.full((3000,), float(value))}


def test_progress_reaches_the_callback_in_order_and_stats_say_how_it_went(daemon, ckpt):
    ckpt.save(1, state(1)).result(timeout=60)
    assert not ckpt.load_stats
    daemon.news = list(PROGRESS)
    heard, into = [], state()
    assert ckpt.load(into, progress=heard.append) == 1
    assert heard[:2] == [LoadProgress(1, 4, 8, 1), LoadProgress(3, 4, 9, 2)]
    assert len(heard) == 3 and heard[2].bytes_done == heard[2].bytes_total == ckpt.load_stats["bytes"]
    assert torch.equal(into["w"], state(1)["w"])
    assert set(ckpt.load_stats) == {
        "step", "saved_by", "bytes", "local_bytes", "fetched_bytes", "holders", "bad_copies", "restore_s", "total_s"
    }  # fmt: skip
    assert ckpt.load_stats["step"] == 1
    with pytest.raises(TypeError):
        ckpt.load_stats["step"] = 2


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_what_a_callback_raises_ends_the_load_and_changes_nothing(daemon, ckpt, kind):
    ckpt.save(1, state(1)).result(timeout=60)
    daemon.news = list(PROGRESS)

    def refuse(progress):
        raise kind("enough")

    into = state()
    with pytest.raises(kind, match="enough"):
        ckpt.load(into, progress=refuse)
    assert not into["w"].any()
    assert ckpt.load(into) == 1


def maps(monkeypatch):
    mapped, plain = [], fastcheck.shared_memory.map_file

    def counted(ref, **options):
        mapped.append(ref.path)
        return plain(ref, **options)

    monkeypatch.setattr(fastcheck.shared_memory, "map_file", counted)
    return mapped


def test_a_segment_named_ahead_is_mapped_once(daemon, near, monkeypatch):
    near.save(1, state(1)).result(timeout=60)
    path = daemon.memory.by_step(1).path
    daemon.news = [pb.LoadSegment(segment=pb.SegmentRef(path=str(path), bytes=path.stat().st_size))]
    mapped, into = maps(monkeypatch), state()
    assert near.load(into) == 1
    assert mapped == [str(path)]
    assert torch.equal(into["w"], state(1)["w"])


def test_a_wrong_guess_is_forgotten_and_a_file_that_is_gone_is_no_matter(daemon, near, monkeypatch):
    near.save(1, state(1)).result(timeout=60)
    near.save(2, state(2)).result(timeout=60)
    other = daemon.memory.by_step(1).path
    daemon.news = [
        pb.LoadSegment(segment=pb.SegmentRef(path=str(daemon.folder / "gone.seg"), bytes=4096)),
        pb.LoadSegment(segment=pb.SegmentRef(path=str(other), bytes=other.stat().st_size)),
    ]
    mapped, into = maps(monkeypatch), state()
    assert near.load(into) == 2
    assert mapped[-1] == str(daemon.memory.by_step(2).path)
    assert torch.equal(into["w"], state(2)["w"])


@pytest.mark.parametrize("when", ["good", "changed since", "unreadable", "of another size"])
def test_a_header_parsed_ahead_counts_only_if_it_is_the_one_that_was_checked(daemon, near, monkeypatch, when):
    near.save(1, {"number": 1, **state(1)}).result(timeout=60)
    saved = daemon.memory.by_step(1)
    path, good = saved.path, saved.path.read_bytes()
    at, size = saved.sealed.header_offset, saved.sealed.header_bytes
    ready, read = [], fastcheck.segments.MappedSegment.read
    other = good[at : at + size].replace(b"\n\x01w", b"\n\x01v")
    bad = {"changed since": other, "unreadable": b"\xff" * size}.get(when, good[at : at + size])
    assert when not in ("changed since",) or bad != good[at : at + size]

    def early(segment, offset, count):
        found = read(segment, offset, count)
        assert found == good[at : at + size]
        ready.append(count)
        return bad

    monkeypatch.setattr(fastcheck.segments.MappedSegment, "read", early)
    daemon.news = [
        pb.LoadSegment(
            segment=pb.SegmentRef(path=str(path), bytes=path.stat().st_size),
            state_bytes=saved.sealed.state_bytes + 4096 * (when == "of another size"),
            header_offset=at,
            header_bytes=size,
        )
    ]
    parsed, parse = [], fastcheck.shared_memory.parse
    monkeypatch.setattr(fastcheck.shared_memory, "parse", lambda *a: parsed.append(a) or parse(*a))
    into = {"number": 0, **state()}
    assert near.load(into) == 1
    assert into["number"] == 1
    assert torch.equal(into["w"], state(1)["w"])
    assert ready == [size]
    assert len(parsed) == (1 if when == "good" else 2), "parsed again unless the bytes are the same"


class Doubles(torch.nn.Linear):
    """Looks at what it had when it is loaded."""

    def __init__(self):
        super().__init__(40, 40)
        self.had = None
        self.register_load_state_dict_pre_hook(self.look)

    def look(self, module, state_dict, *rest):
        self.had = self.weight.detach().clone()


def test_a_module_is_filled_in_place_and_a_hook_sees_what_was_there_before(near):
    torch.manual_seed(1)
    source = {
        "plain": torch.nn.Linear(50, 50),
        "hooked": Doubles(),
        "t": torch.randn(7, 5).t(),
        "tensor": torch.ones(9),
    }
    near.save(1, source).result(timeout=60)
    into = {
        "plain": torch.nn.Linear(50, 50),
        "hooked": Doubles(),
        "t": torch.zeros(7, 5).t(),
        "tensor": torch.zeros(9),
    }
    before, kept = into["hooked"].weight.detach().clone(), into["plain"].weight.data_ptr()
    version = into["tensor"]._version
    assert near.load(into) == 1
    assert torch.equal(into["hooked"].had, before)
    for name in ("plain", "hooked"):
        assert torch.equal(into[name].weight, source[name].weight)
        assert torch.equal(into[name].bias, source[name].bias)
    assert torch.equal(into["t"], source["t"])
    assert into["plain"].weight.data_ptr() == kept
    assert into["tensor"]._version > version, "autograd has to notice"


def test_a_large_module_and_its_optimizer_are_poured_by_several_threads(daemon, monkeypatch):
    def make(seed):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(6)))
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(2, 1500)).sum().backward()
        optimizer.step()
        return net, optimizer

    net, optimizer = make(1)
    with Checkpointer(job="gpt", address=daemon.address, copy_threads=3) as ckpt:
        ckpt.save(1, {"net": net, "optimizer": optimizer}).result(timeout=30)
        other, its_optimizer = make(2)
        ckpt.load({"net": other, "optimizer": its_optimizer})
        assert [t for t in threading.enumerate() if t.name.startswith("fastcheck-copy")]
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for name, value in optimizer.state[one].items():
            assert torch.equal(value, its_optimizer.state[two][name]), name
