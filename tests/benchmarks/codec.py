"""`--only codec`: how small real training states become, how fast, on one core; next to what others would make of them.

Rates are 10^9 original bytes per second of CPU time of the thread that works. In each round everything (the codec, a
plain copy, the peers) sees the same bytes once, so that all share the machine's weather.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.chunk_plan import ChunkPlan, parse_layout
from fastcheckd.codec.decoder import decode, raw_way_back, turn_around
from fastcheckd.codec.encoder import encode
from fastcheckd.digests import chunk_digest

from .goals import Goal, goal_of
from .peers import PEERS, Peer
from .quantising import quantised
from .sequences import Pair, pairs, sequences

Bytes = npt.NDArray[np.uint8]

#: The strongest that a trainer can ask for.
LOSSY = pb.Precision(momentum=pb.MOMENTUM_CODING_INDEX4, weights_bound=1e-3)
#: Kinds whose moments and weights the lossy coding is tried on.
LOSSY_KINDS = ("AdamW, fp32", "AdamW, bf16 with fp32 master")


@dataclass(frozen=True)
class Chunk:
    """One chunk of a pair: the same bytes at two steps, with their digests."""

    new: memoryview
    base: memoryview
    plan: ChunkPlan
    digest: bytes
    base_digest: bytes


@dataclass(frozen=True)
class Rate:
    """CPU seconds of each round for so many original bytes."""

    raw_bytes: int
    rounds_s: list[float] = field(default_factory=list)

    @property
    def gbps(self) -> float:
        """Median."""
        return self.raw_bytes / statistics.median(self.rounds_s) / 1e9

    def __str__(self) -> str:
        low, high = (self.raw_bytes / s / 1e9 for s in (max(self.rounds_s), min(self.rounds_s)))
        return f"{self.gbps:.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Row:
    """One pair of snapshots, encoded."""

    name: str
    base_step: int
    step: int
    lossy: bool
    #: Chunks that hold tensors, and all chunks (the state header, in chunks of its own, included).
    tensor_chunks_bytes: int
    tensor_chunks_encoded_bytes: int
    raw_bytes: int
    encoded_bytes: int
    #: The caller's tensors alone; the rest of the tensors' chunks are gaps for alignment.
    tensor_bytes: int
    way_back_bytes: int
    #: Original and encoded bytes by codec; "(as it is)": chunks that would not shrink.
    shares: dict[str, tuple[int, int]]
    encode: Rate
    decode: Rate
    turn_around: Rate
    memcpy: Rate
    peers: dict[str, tuple[float, Rate, Rate]]
    goal: Goal | None
    loss: float

    @property
    def ratio(self) -> float:
        """Of the tensors' chunks; what the goal is about."""
        return self.tensor_chunks_bytes / self.tensor_chunks_encoded_bytes

    @property
    def whole_ratio(self) -> float:
        """Of everything that is sent."""
        return self.raw_bytes / self.encoded_bytes

    @property
    def missed(self) -> list[str]:
        """Goals that are not reached."""
        return self.goal.missed(self.ratio, self.encode.gbps, self.decode.gbps) if self.goal else []

    def to_json(self) -> dict[str, Any]:
        """Every run, and what the table shows."""
        return asdict(self) | {"ratio": self.ratio, "whole_ratio": self.whole_ratio, "missed": self.missed}


def chunks_of(pair: Pair) -> list[Chunk]:
    """The chunks of both steps; their layouts must agree about where chunks end, as a holder would demand."""
    new, base = pair.new, pair.base
    plans = parse_layout(new.layout, len(new.bytes))
    lengths = [chunk.bytes for chunk in base.layout.chunks]
    if not plans or [plan.bytes for plan in plans] != lengths:
        raise RuntimeError(
            f"the layouts of steps {base.step} and {new.step} differ: nothing could be sent as a patch"
        )
    chunks, start = [], 0
    for plan in plans:
        a, b = (memoryview(s.bytes)[start : start + plan.bytes] for s in (new, base))
        chunks.append(Chunk(a, b, plan, chunk_digest(a), chunk_digest(b)))
        start += plan.bytes
    return chunks


def with_losses(pair: Pair) -> Pair:
    """The pair as a lossy trainer's nodes have it: the base quantised on its own, the newer against that base."""
    base = quantised(pair.base, None, LOSSY)
    return Pair(base, quantised(pair.new, base, LOSSY), pair.trained_s)


class Bench:
    """One pair: what the codec makes of it, proved, and then measured in rounds."""

    def __init__(self, name: str, pair: Pair, lossy: bool) -> None:
        self.name, self.pair, self.lossy = name, pair, lossy
        self.chunks = chunks_of(pair)
        longest = max(len(chunk.new) for chunk in self.chunks)
        # Not numpy's own memory, which is not aligned to 64 bytes as segments are.
        self.out: Bytes = torch.zeros(longest, dtype=torch.uint8).numpy()
        self.raw_bytes = sum(len(chunk.new) for chunk in self.chunks)
        self.payloads: list[bytes | None] = []
        self.ways_back: list[bytes] = []
        self.shares: dict[str, tuple[int, int]] = {}
        self._encode_and_prove()

    def encode(self, chunk: Chunk) -> Any:
        """As an owner does."""
        return encode(
            chunk.new,
            chunk.base,
            chunk.plan,
            step=self.pair.new.step,
            base_step=self.pair.base.step,
            digest=chunk.digest,
            base_digest=chunk.base_digest,
        )

    def _encode_and_prove(self) -> None:
        for chunk in self.chunks:
            encoded = self.encode(chunk)
            self.payloads.append(None if encoded is None else bytes(encoded.payload))
            if encoded is None:
                self._share("(as it is)", len(chunk.new), len(chunk.new))
            else:
                for use in encoded.uses:
                    self._share(use.codec, use.raw_bytes, use.encoded_bytes)
        for chunk, payload in zip(self.chunks, self.payloads, strict=True):
            out = memoryview(self.out)[: len(chunk.new)]
            if payload is not None:
                decode(payload, chunk.base, out)
                self._prove(out == chunk.new, "decoded")
            self.ways_back.append(self.way_back(chunk, payload))
            decode(self.ways_back[-1], chunk.new, out)
            self._prove(out == chunk.base, "turned back")

    def _prove(self, same: bool, what: str) -> None:
        if not same:
            step = self.pair.new.step
            raise RuntimeError(
                f"{self.name}, step {step}: a chunk came out different when {what}: a defect of the codec"
            )

    def _share(self, codec: str, raw_bytes: int, encoded_bytes: int) -> None:
        raw, encoded = self.shares.get(codec, (0, 0))
        self.shares[codec] = raw + raw_bytes, encoded + encoded_bytes

    def way_back(self, chunk: Chunk, payload: bytes | None) -> bytes:
        """As a holder writes it before it puts the newer bytes in place."""
        if payload is not None:
            return turn_around(payload, chunk.base, chunk.new)
        return raw_way_back(
            chunk.base,
            chunk.digest,
            chunk.base_digest,
            step=self.pair.new.step,
            base_step=self.pair.base.step,
        )

    def measure(self, rounds: int) -> Row:
        """Time it, next to a copy and to the peers."""
        sent = [(c, p) for c, p in zip(self.chunks, self.payloads, strict=True)]
        encoding, decoding, turning, copying = (Rate(self.raw_bytes) for _ in range(4))
        peers = {peer.name: _PeerRun(peer, self.chunks, self.out) for peer in PEERS}
        for _ in range(rounds):
            copying.rounds_s.append(_cpu_s(self._copy, self.chunks))
            encoding.rounds_s.append(_cpu_s(self.encode, self.chunks))
            decoding.rounds_s.append(_cpu_s(self._decode, sent))
            turning.rounds_s.append(_cpu_s(lambda both: self.way_back(*both), sent))
            for peer in peers.values():
                peer.round()
        sizes = [len(c.new) if p is None else len(p) for c, p in sent]
        tensors = [bool(c.plan.units) for c in self.chunks]
        return Row(
            name=self.name,
            base_step=self.pair.base.step,
            step=self.pair.new.step,
            lossy=self.lossy,
            tensor_chunks_bytes=sum(len(c.new) for c, t in zip(self.chunks, tensors, strict=True) if t),
            tensor_chunks_encoded_bytes=sum(s for s, t in zip(sizes, tensors, strict=True) if t),
            raw_bytes=self.raw_bytes,
            encoded_bytes=sum(sizes),
            tensor_bytes=self.pair.new.tensor_bytes,
            way_back_bytes=sum(map(len, self.ways_back)),
            shares=self.shares,
            encode=encoding,
            decode=decoding,
            turn_around=turning,
            memcpy=copying,
            peers={name: (run.ratio, run.compress, run.decompress) for name, run in peers.items()},
            goal=goal_of(self.name, self.pair.gap, self.lossy),
            loss=self.pair.new.loss,
        )

    def _copy(self, chunk: Chunk) -> None:
        memoryview(self.out)[: len(chunk.new)] = chunk.new

    def _decode(self, sent: tuple[Chunk, bytes | None]) -> None:
        chunk, payload = sent
        if payload is None:
            self._copy(chunk)
        else:
            decode(payload, chunk.base, memoryview(self.out)[: len(chunk.new)])


class _PeerRun:
    def __init__(self, peer: Peer, chunks: list[Chunk], out: Bytes) -> None:
        self._peer = peer
        self._out = out
        # Told the size of the numbers, which is all that they can use.
        self._todo = [(np.frombuffer(c.new, np.uint8), _number_bytes(c.plan)) for c in chunks]
        raw_bytes = sum(len(data) for data, _ in self._todo)
        self._done = [peer.compress(*item) for item in self._todo]
        self.ratio = raw_bytes / sum(map(len, self._done))
        self.compress, self.decompress = Rate(raw_bytes), Rate(raw_bytes)

    def round(self) -> None:
        self.compress.rounds_s.append(_cpu_s(lambda item: self._peer.compress(*item), self._todo))
        sized = [
            (done, self._out[: len(data)]) for done, (data, _) in zip(self._done, self._todo, strict=True)
        ]
        self.decompress.rounds_s.append(_cpu_s(lambda item: self._peer.decompress(*item), sized))


def _number_bytes(plan: ChunkPlan) -> int:
    """Size of the numbers that make up most of a chunk."""
    sizes: dict[int, int] = {1: 0}
    for unit in plan.units:
        for run in unit.runs:
            sizes[run.dtype.bytes] = sizes.get(run.dtype.bytes, 0) + run.stop - run.offset
    return max(sizes, key=lambda size: sizes[size])


def _cpu_s(work: Callable[[Any], object], items: Iterable[Any]) -> float:
    started = time.thread_time()
    for item in items:
        work(item)
    return time.thread_time() - started


def measure(rounds: int, quick: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """All kinds of training, all pairs, and the lossy ones."""
    for sequence in sequences(quick):
        for pair in pairs(sequence):
            settings = (False, True) if sequence.name in LOSSY_KINDS else (False,)
            for lossy in settings:
                row = Bench(sequence.name, with_losses(pair) if lossy else pair, lossy).measure(rounds)
                say(
                    f"{row.name}{', lossy' * lossy}, {row.base_step} -> {row.step}: {row.ratio:.2f}, "
                    f"encode {row.encode}, decode {row.decode} GB/s; loss {row.loss:.3f} after {pair.trained_s:.0f} s of training"
                )
                yield row


def print_rows(rows: list[Row]) -> None:
    """The codec against its goals, then the peers, then what was missed."""
    console = Console(width=190)
    table = Table(
        title="The codec on real training states (one core; GB/s of original bytes: median, lowest to highest)"
    )
    for column in (
        "state", "steps", "MB", "ratio: tensors (whole)", "encode GB/s", "decode GB/s", "of a copy",
        "way back, of raw; GB/s", "by codec: share of bytes, ratio", "goal", "met",
    ):  # fmt: skip
        table.add_column(column)
    for row in rows:
        copies = f"1/{row.memcpy.gbps / row.encode.gbps:.0f}, 1/{row.memcpy.gbps / row.decode.gbps:.0f}"
        goal = row.goal
        table.add_row(
            row.name + ", lossy" * row.lossy,
            f"{row.base_step} -> {row.step}",
            f"{row.raw_bytes / 1e6:.1f}",
            f"{row.ratio:.2f} ({row.whole_ratio:.2f})",
            str(row.encode),
            str(row.decode),
            copies,
            f"1/{row.raw_bytes / row.way_back_bytes:.2f}; {row.turn_around}",
            ", ".join(
                f"{n} {r / row.raw_bytes:.0%} {r / max(e, 1):.3g}x" for n, (r, e) in row.shares.items()
            ),
            f"{goal.ratio:g}; {goal.encode_gbps:g}/{goal.decode_gbps:g}" if goal else "",
            "" if goal is None else "no" if row.missed else "yes",
        )
    console.print(table)
    peers = Table(
        title="Others on the same bytes in the same run, chunk by chunk (ratio; compress / decompress GB/s, medians)"
    )
    for column in ("state", "steps", "FastCheck", *(peer.name for peer in PEERS), "copy"):
        peers.add_column(column)
    for row in rows:
        peers.add_row(
            row.name + ", lossy" * row.lossy,
            f"{row.base_step} -> {row.step}",
            f"{row.whole_ratio:.2f}; {row.encode.gbps:.2f} / {row.decode.gbps:.2f}",
            *(f"{ratio:.2f}; {c.gbps:.2f} / {d.gbps:.2f}" for ratio, c, d in row.peers.values()),
            f"{row.memcpy.gbps:.1f}",
        )
    console.print(peers)
    for row in rows:
        for what in row.missed:
            console.print(
                f"NOT MET  {row.name}{', lossy' * row.lossy}, {row.base_step} -> {row.step}: {what}"
            )
    met = sum(1 for row in rows if row.goal and not row.missed)
    console.print(f"{met} of {sum(1 for row in rows if row.goal)} rows with a goal meet it")
