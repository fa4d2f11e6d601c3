"""Damaged and forged payloads against the decoder: an error of ours, or the chunk that the header's digest names.

`python -m tests.unit.fastcheckd.codec.fuzz --count N [--seed S]` from the repository, with the packages importable.
Payload number i of a seed is always the same; a failure names both.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does for the tests beside it
from codec_helpers import (
    LOW,
    PARAM,
    adam_arrays,
    adam_step,
    adam_unit,
    encode_chunk,
    gaussian,
    joined,
    noise,
    run,
    sgd_arrays,
    sgd_step,
    sgd_unit,
    single,
    whole,
)  # fmt: skip

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.chunk_plan import ChunkPlan, Unit
from fastcheckd.codec.decoder import decode, decode_range, read_header, reverse
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.format import (
    HEADER_BYTES,
    PLANE_BYTES,
    SECTION_BYTES,
    CodecId,
    Header,
    Plane,
    PlaneKind,
    Section,
    pack,
    parse,
)  # fmt: skip
from fastcheckd.codec.lossy import quantise
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import CodecError, MispredictedError

INTERESTING = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 255, 256, 4095, 4096, 4097, 65535, 65536,
               (1 << 24) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 4, (1 << 32) - 1]  # fmt: skip


@dataclass(frozen=True)
class Seed:
    """A valid payload, and what it was made from."""

    name: str
    payload: bytes
    base: bytes | None
    new: bytes


def seeds() -> list[Seed]:
    """Small payloads of every codec, forth and back."""
    n = 300
    w = (gaussian(n, 1).view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
    rows = w.copy()
    rows[20:40] += np.float32(1e-3)
    fresh = w.copy()
    fresh[20:40] = np.frombuffer(noise(80), np.float32)
    unit = Unit((run(0, n, DType.BFLOAT16, LOW), run(2 * n, n, role=PARAM)))
    bits = w.view(np.uint32) & np.uint32(0xFFFF0000)
    copy = (bits >> 16).astype(np.uint16).tobytes() + bits.tobytes()
    made: list[tuple[str, bytes, bytes | None, ChunkPlan]] = [
        ("same", w.tobytes(), w.tobytes(), single(n)),
        ("planes", w.tobytes(), None, single(n)),
        ("delta", (w * np.float32(1.00001)).tobytes(), w.tobytes(), single(n)),
        ("rows of differences", rows.tobytes(), w.tobytes(), single(n, rows=20)),
        ("rows", fresh.tobytes(), w.tobytes(), single(n, rows=20)),
        ("rounded", copy, None, whole(unit)),
        (
            "gaps",
            bytes(500) + w.tobytes() + bytes(500),
            None,
            ChunkPlan(4 * n + 1000, (Unit((run(500, n),)),)),
        ),
    ]
    for step in (adam_step(), adam_step(amsgrad=True)):
        older, newer = adam_arrays(n, step)
        made.append(("adam", joined(newer), joined(older), whole(adam_unit(n, step))))
    for step in (sgd_step(), sgd_step(nesterov=True)):
        older, newer = sgd_arrays(n, step)
        made.append(("sgd", joined(newer), joined(older), whole(sgd_unit(n, step))))
    older, newer = adam_arrays(n, adam_step())
    several = ChunkPlan(16 * n, (adam_unit(n, adam_step()), Unit((run(12 * n, n, rows=20),))))
    made.append(("several", joined(newer) + rows.tobytes(), joined(older) + w.tobytes(), several))
    result = []
    for name, new, base, plan in made:
        encoded = encode_chunk(new, base, plan)
        assert encoded is not None, name
        result.append(Seed(name, encoded.payload, base, new))
        if base is not None:
            result.append(Seed(f"{name} back", reverse(encoded.payload, base, new), new, base))
    new, base = w.tobytes(), rows.tobytes()
    plane = Plane(PlaneKind.RAW, 0, memoryview(base))
    uncoded = Section(CodecId.RAW, DType.BYTES, 0, len(base), planes=(plane,))
    header = Header(len(base), True, 7, 8, chunk_digest(base), chunk_digest(new))
    result.append(Seed("raw", pack(header, [uncoded]), new, base))
    return result + lossy_seeds(n)


def lossy_seeds(n: int) -> list[Seed]:
    """Of the codecs that a trainer must ask for."""
    result = []
    for coding in (pb.MOMENTUM_CODING_INDEX8, pb.MOMENTUM_CODING_INDEX4):
        unit = adam_unit(n, adam_step())
        plan = ChunkPlan(12 * n, (unit,), pb.Precision(momentum=coding, weights_bound=1e-2))
        older, newer = (bytearray(joined(arrays)) for arrays in adam_arrays(n, adam_step()))
        quantise(memoryview(older), None, plan)
        quantise(memoryview(newer), memoryview(older), plan)
        encoded = encode_chunk(bytes(newer), bytes(older), plan)
        assert encoded is not None
        result.append(Seed("lossy", encoded.payload, bytes(older), bytes(newer)))
        back = reverse(encoded.payload, bytes(older), bytes(newer))
        result.append(Seed("lossy back", back, bytes(newer), bytes(older)))
    return result


def repaired(payload: bytes | bytearray) -> bytes:
    """With the size and the checksum that its content asks for, so that a decoder looks at the rest."""
    data = bytearray(payload)
    if len(data) >= HEADER_BYTES:
        struct.pack_into("<I", data, 12, len(data))
        check = xxhash.xxh3_64(data[:88])
        check.update(data[HEADER_BYTES:])
        struct.pack_into("<Q", data, 88, check.intdigest())
    return bytes(data)


# --- damage: the checksum must notice -------------------------------------------------------------


def damaged(rng: random.Random, seed: Seed, others: list[Seed]) -> bytes:
    """Flipped, cut, lengthened, or joined with another."""
    data = bytearray(seed.payload)
    kind = rng.randrange(4)
    if kind == 0:
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.randbytes(rng.choice([1, 2, 8, 100]))
    else:
        other = rng.choice(others).payload
        cut = rng.randrange(len(data))
        data[cut:] = other[rng.randrange(len(other)) :]
    return bytes(data)


# --- forgery: fields changed, checksum right ------------------------------------------------------


def fields(payload: bytes) -> list[tuple[int, int]]:
    """Places and sizes of all numbers in a payload: (offset, bytes)."""
    found = [(4, 1), (5, 1), (6, 2), (8, 4), (16, 8), (24, 8), (32, 8), (48, 8), (64, 4)]
    at = HEADER_BYTES
    for section in parse(payload)[1]:
        found += [(at + i, 1) for i in range(4)] + [(at + i, 4) for i in (4, 8, 12, 16, 20)]
        at += SECTION_BYTES
        found += [(at + i, 4) for i in range(0, len(section.extra), 4)]
        at += len(section.extra)
        for _ in section.planes:
            found += [(at, 1), (at + 1, 1), (at + 2, 2), (at + 4, 4)]
            at += PLANE_BYTES
        at += section.body_bytes
    return found


def with_field(rng: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at, size = rng.choice(fields(payload))
        old = int.from_bytes(data[at : at + size], "little")
        new = rng.choice(
            [rng.choice(INTERESTING), old + rng.choice([-4, -1, 1, 4]), rng.getrandbits(32), old * 2]
        )
        data[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    return repaired(data)


def with_body_bytes(rng: random.Random, payload: bytes) -> bytes:
    """Anything behind the header changed, cut or lengthened."""
    data = bytearray(payload)
    for _ in range(rng.choice([1, 2, 5])):
        data[rng.randrange(HEADER_BYTES, len(data))] = rng.getrandbits(8)
    if rng.random() < 0.2:
        del data[rng.randrange(HEADER_BYTES, len(data)) :]
    elif rng.random() < 0.2:
        data += rng.randbytes(rng.randrange(1, 40))
    return repaired(data)


def bomb(rng: random.Random, elements: int) -> Plane:
    """A compressed plane of another size than it ought to have, or one that lies about it."""
    kind = rng.randrange(5)
    if kind == 0:  # really large
        return Plane(
            PlaneKind.ZSTD, 0, zstandard.ZstdCompressor().compress(bytes(rng.choice([1 << 20, 5 << 20])))
        )
    honest = bytearray(zstandard.ZstdCompressor().compress(bytes(max(256, elements))))
    if kind == 1:  # 4 GB, in a frame header with eight bytes of content size
        return Plane(
            PlaneKind.ZSTD, 0, b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 32) + bytes(honest[6:])
        )
    if kind == 2:  # the right size is claimed, more or less is in it
        size = elements.to_bytes(8, "little")
        other = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(rng.choice([1, 1 << 20])))
        return Plane(PlaneKind.ZSTD, 0, b"\x28\xb5\x2f\xfd\xe0" + size + other[6:])
    if kind == 3:  # a frame to be skipped, or of unknown size
        skipped = struct.pack("<II", 0x184D2A50, elements) + bytes(min(elements, 64))
        unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(elements))
        return Plane(PlaneKind.ZSTD, 0, rng.choice([skipped, unknown]))
    honest[rng.randrange(len(honest))] ^= 1 << rng.randrange(8)
    return Plane(PlaneKind.ZSTD, 0, bytes(honest))


def mutated_section(rng: random.Random, section: Section, others: list[Section]) -> list[Section]:
    planes = list(section.planes)
    kind = rng.randrange(9)
    if kind == 0 and planes:
        planes[rng.randrange(len(planes))] = bomb(rng, section.elements)
    elif kind == 1 and planes:
        size = rng.choice([section.elements, section.elements * section.dtype.bytes, rng.randrange(1, 400)])
        planes[rng.randrange(len(planes))] = Plane(PlaneKind.RAW, 0, rng.randbytes(size))
    elif kind == 2 and planes:
        planes[rng.randrange(len(planes))] = Plane(PlaneKind.CONSTANT, rng.choice([0, 1, 127, 128, 255]))
    elif kind == 3:
        planes = rng.choice([planes[:-1], planes + planes[:1], planes * 2, [Plane(PlaneKind.CONSTANT)] * 32])[
            :32
        ]
    elif kind == 4:
        extra = bytearray(section.extra)
        if extra:
            struct.pack_into("<I", extra, 4 * rng.randrange(len(extra) // 4), rng.choice(INTERESTING))
        return [replace(section, extra=bytes(extra))]
    elif kind == 5:
        other = rng.choice(others)
        return [replace(section, codec=other.codec, extra=other.extra, flags=rng.randrange(2))]
    elif kind == 6:
        return [replace(section, codec=CodecId(rng.randrange(11)), dtype=DType(rng.randrange(9)))]
    elif kind == 7:
        size = section.dtype.bytes
        moved = replace(section, offset=max(0, section.offset + size * rng.choice([-8, -1, 0, 1, 8])))
        return [section, moved] if rng.random() < 0.5 else [moved]
    else:
        cut = max(1, min(section.elements - 1, rng.randrange(1, section.elements + 1)))
        return [replace(section, elements=rng.choice([cut, section.elements + rng.randrange(1, 9)]))]
    return [replace(section, planes=tuple(planes))]


def with_sections(rng: random.Random, payload: bytes, all_sections: list[Section]) -> bytes:
    header, sections = parse(payload)
    at = rng.randrange(len(sections))
    sections[at : at + 1] = mutated_section(rng, sections[at], all_sections)
    if rng.random() < 0.1:
        rng.shuffle(sections)
    if rng.random() < 0.05:
        header = replace(header, needs_base=False, base_digest=bytes(16))
    return pack(header, sections)


# --- the check ------------------------------------------------------------------------------------


class Fuzzer:
    """Payload number i, and what comes of it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.seeds = seeds()
        self._sections = [s for item in self.seeds for s in parse(item.payload)[1]]
        self.outcomes: Counter[str] = Counter()

    def payload(self, index: int) -> tuple[Seed, bytes, random.Random]:
        rng = random.Random(self._seed << 40 | index)
        seed = rng.choice(self.seeds)
        kind = rng.randrange(8)
        if kind == 0:
            return seed, damaged(rng, seed, self.seeds), rng
        if kind == 1:
            return seed, with_body_bytes(rng, seed.payload), rng
        if kind <= 3:
            return seed, with_field(rng, seed.payload), rng
        return seed, with_sections(rng, seed.payload, self._sections), rng

    def check(self, index: int) -> None:
        """Raises AssertionError, with the number, if anything but our errors or the right bytes comes out."""
        seed, payload, rng = self.payload(index)
        try:
            self.outcomes[verdict(payload, seed, rng)] += 1
        except Exception as error:
            raise AssertionError(
                f"seed {self._seed}, payload {index} (from {seed.name}): {error!r}"
            ) from error


def verdict(payload: bytes, seed: Seed, rng: random.Random) -> str:
    """What decoding made of it: a word for the count."""
    out = bytearray(len(seed.new))
    start, stop = sorted(rng.randrange(len(out) + 1) for _ in range(2))
    attempt(decode_range, payload, seed.base, bytearray(len(out)), start, stop)
    attempt(reverse, payload, seed.base or bytes(len(out)), seed.new)
    # A base that the header denies, and one of another size, must not be touched.
    attempt(decode, payload, b"\x55" * rng.choice([0, 3, 5000]), bytearray(len(out)))
    error = attempt(decode, payload, seed.base, out)
    if error is not None:
        return "mispredicted" if isinstance(error, MispredictedError) else "refused"
    assert chunk_digest(out) == read_header(payload).digest
    return "unharmed" if payload == seed.payload else "harmless"


def attempt(function: Any, *arguments: Any) -> CodecError | None:
    try:
        function(*arguments)
    except CodecError as error:
        return error
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 20))
    arguments = parser.parse_args()
    fuzzer = Fuzzer(arguments.seed)
    began = time.monotonic()
    for index in range(arguments.count):
        fuzzer.check(index)
    took_s = time.monotonic() - began
    sys.stdout.write(f"seed {arguments.seed}: {dict(fuzzer.outcomes)} in {took_s:.0f} s\n")


if __name__ == "__main__":
    main()
