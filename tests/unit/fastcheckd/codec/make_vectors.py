"""Writes vectors/: what this version encodes, to be decoded by every later one, on every CPU.

`python -m tests.unit.fastcheckd.codec.make_vectors` from the repository, once for a codec; existing files stay, for
chunks encoded then must decode for ever. All inputs follow from integers (codec_helpers.mixed).
A file: base bytes u32 (0: none), digest of the decoded chunk (16), the base, the payload.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does for the tests beside it
from codec_helpers import adam_arrays, adam_step, gaussian, joined, sgd_arrays, sgd_step
from fuzz import seeds

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec import adam, sgd
from fastcheckd.digests import chunk_digest

FOLDER = Path(__file__).parent / "vectors"
HEAD = struct.Struct("<I16s")


def predictions() -> dict[str, bytes]:
    """Digest of what the arithmetic alone predicts, by name; no residual hides a difference."""
    n = 3001
    found: dict[str, bytes] = {}
    awkward = np.array(
        [0, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC00002, 0x7F7FFFFF], np.uint32
    )
    with np.errstate(all="ignore"):
        for name, step in {
            "adamw": adam_step(),
            "adam": adam_step(kind=pb.OPTIMIZER_KIND_ADAM),
            "odd": adam_step(beta1=0.83, beta2=0.937, eps=1e-5, lr=0.0371, step=2),
        }.items():
            constants = adam.AdamConstants.of(step)
            assert constants is not None
            (w0, m0, v0), (w1, m1, v1) = adam_arrays(n, step, 11)
            for array, shift in ((w0, 0), (m0, 1), (v0, 2), (m1, 3), (v1, 4)):
                array[100:900] = np.roll(np.tile(awkward, 100), shift).view(np.float32)
            block = adam._Block(constants, n)
            found[f"{name} v"] = chunk_digest(block.next_v(m0, m1, v0).tobytes())
            found[f"{name} w"] = chunk_digest(block.next_w(w0, m1, v1).tobytes())
            found[f"{name} v back"] = chunk_digest(block.previous_v(m0, m1, v1).tobytes())
            found[f"{name} w back"] = chunk_digest(block.previous_w(w1, m1, v1).tobytes())
        for name, sgd_hyper in {
            "sgd": sgd_step(),
            "nesterov": sgd_step(nesterov=True, dampening=0.25),
        }.items():
            of_sgd = sgd.SgdConstants.of(sgd_hyper)
            assert of_sgd is not None
            (w0, b0), (w1, b1) = sgd_arrays(n, sgd_hyper, 12)
            for array, shift in ((w0, 0), (b0, 1), (b1, 2), (w1, 3)):
                array[100:900] = np.roll(np.tile(awkward, 100), shift).view(np.float32)
            sgd_block = sgd._Block(of_sgd, n)
            found[f"{name} w"] = chunk_digest(sgd_block.next_w(w0, b0, b1).tobytes())
            found[f"{name} w back"] = chunk_digest(sgd_block.previous_w(w1, b0, b1).tobytes())
    return found


def inputs() -> dict[str, bytes]:
    """Digests of the inputs themselves: when these differ, it is the generator that changed."""
    return {
        "gaussian": chunk_digest(gaussian(1000, 1).tobytes()),
        "adam": chunk_digest(b"".join(map(joined, adam_arrays(1000, adam_step())))),
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds()):
        path = FOLDER / f"{number:02d}-{seed.name.replace(' ', '-')}.bin"
        if not path.exists():
            base = seed.base or b""
            path.write_bytes(HEAD.pack(len(base), chunk_digest(seed.new)) + base + seed.payload)
    path = FOLDER / "predictions.txt"
    if not path.exists():
        lines = [f"{digest.hex()} {name}\n" for name, digest in {**inputs(), **predictions()}.items()]
        path.write_text("".join(lines))


if __name__ == "__main__":
    main()
