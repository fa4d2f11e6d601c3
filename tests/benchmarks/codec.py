"""`--only codec`: how small real training states become, how fast, on one core; next to what others would make of them.

Rates are 10^9 original bytes per second of CPU time of the thread that works. In each round everything (the codec, a
plain copy, the peers) sees the same bytes once, so that all share the machine's weather.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.chunk_plan import ChunkPlan, parse_layout
from fastcheckd.codec.decoder import decode, reverse
from fastcheckd.codec.encoder import Encoded, encode
from fastcheckd.codec.fit import Fits
from fastcheckd.digests import chunk_digest

from .codec_rows import Rate, Row, goal_of
from .compressors import COMPRESSORS, Compressor
from .sequences import Pair, pairs, quantised, sequences

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
        a, b = (s.bytes.data[start : start + plan.bytes] for s in (new, base))
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
        self.reverse_deltas: list[bytes] = []
        self.shares: dict[str, tuple[int, int]] = {}
        self._encode_and_prove()

    def encode(self, chunk: Chunk, fits: Fits) -> Encoded | None:
        """As an owner does; `fits` lives as long as a save."""
        return encode(
            chunk.new,
            chunk.base,
            chunk.plan,
            step=self.pair.new.step,
            base_step=self.pair.base.step,
            digest=chunk.digest,
            base_digest=chunk.base_digest,
            fits=fits,
        )

    def _encode_and_prove(self) -> None:
        fits = Fits()
        for chunk in self.chunks:
            encoded = self.encode(chunk, fits)
            self.payloads.append(None if encoded is None else bytes(encoded.payload))
            if encoded is None:
                self._share("(as it is)", len(chunk.new), len(chunk.new))
            else:
                for use in encoded.uses:
                    self._share(use.codec, use.raw_bytes, use.encoded_bytes)
        for chunk, payload in zip(self.chunks, self.payloads, strict=True):
            out = self.out.data[: len(chunk.new)]
            if payload is not None:
                self.out.fill(0xA5)  # whatever is not written shows
                decode(payload, chunk.base, out)
                self._prove(out == chunk.new, "decoded")
            self.reverse_deltas.append(self.reverse_delta(chunk, payload))
            if len(self.reverse_deltas[-1]) < len(chunk.base):
                self.out.fill(0xA5)
                decode(self.reverse_deltas[-1], chunk.new, out)
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

    def reverse_delta(self, chunk: Chunk, payload: bytes | None) -> bytes:
        """As a holder makes it where memory is short; what went raw stays as it is."""
        found = None if payload is None else reverse(payload, chunk.base, chunk.new)
        return bytes(chunk.base) if found is None else found

    def measure(self, rounds: int) -> Row:
        """Time it, next to a copy and to the peers."""
        sent = list(zip(self.chunks, self.payloads, strict=True))
        encoding, decoding, turning, copying = (Rate(self.raw_bytes) for _ in range(4))
        peers = {peer.name: _PeerRun(peer, self.chunks, self.out) for peer in COMPRESSORS}
        for _ in range(rounds):
            copying.rounds_s.append(_cpu_s(self._copy, self.chunks))
            fits = Fits()
            encoding.rounds_s.append(_cpu_s(partial(self.encode, fits=fits), self.chunks))
            decoding.rounds_s.append(_cpu_s(self._decode, sent))
            turning.rounds_s.append(_cpu_s(lambda both: self.reverse_delta(*both), sent))
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
            scalars=sum(run.elements == 1 for c in self.chunks for unit in c.plan.units for run in unit.runs),
            reverse_bytes=sum(map(len, self.reverse_deltas)),
            shares=self.shares,
            encode=encoding,
            decode=decoding,
            reverse=turning,
            memcpy=copying,
            peers={name: (run.ratio, run.compress, run.decompress) for name, run in peers.items()},
            goal=goal_of(self.name, self.pair.gap, self.lossy),
            loss=self.pair.new.loss,
        )

    def _copy(self, chunk: Chunk) -> None:
        self.out.data[: len(chunk.new)] = chunk.new

    def _decode(self, sent: tuple[Chunk, bytes | None]) -> None:
        chunk, payload = sent
        if payload is None:
            self._copy(chunk)
        else:
            decode(payload, chunk.base, self.out.data[: len(chunk.new)])


class _PeerRun:
    def __init__(self, peer: Compressor, chunks: list[Chunk], out: Bytes) -> None:
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
    torch.set_num_threads(1)  # as fast at these sizes, and the same sums on every machine
    for sequence in sequences(quick):
        for pair in pairs(sequence):
            settings = (False, True) if sequence.name in LOSSY_KINDS else (False,)
            for lossy in settings:
                row = Bench(sequence.name, with_losses(pair) if lossy else pair, lossy).measure(rounds)
                say(
                    f"{row.name}{', lossy' * lossy}, {row.base_step} -> {row.step}: {row.ratio:.2f}, "
                    f"encode {row.encode}, decode {row.decode} GB/s; "
                    f"loss {row.loss:.3f} after {pair.trained_s:.0f} s of training"
                )
                yield row
