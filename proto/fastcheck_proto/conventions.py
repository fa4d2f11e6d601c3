"""What both ends must agree on and a `.proto` cannot say: names, default places, limits, metadata keys.

Nothing here does I/O beyond reading the environment, and nothing here may import gRPC or torch.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

NAME_BYTES_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

#: Metadata of a trainer's call that shows a token: `Bearer ` and the token.
TOKEN_METADATA_KEY = "authorization"  # noqa: S105  a key's name
#: Kubernetes' have about 1 KiB, and gRPC takes 8 KiB of metadata.
TOKEN_BYTES_MAX = 4096
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")

#: Trailing metadata of a failed call: the `ErrorCode` by name.
ERROR_METADATA_KEY = "fastcheck-error"
#: Metadata of a call that one voter forwards to another, value "1": it is not forwarded again.
FORWARDED_METADATA_KEY = "fastcheck-forwarded"

#: Largest piece of state in one message of `Push` and `Pull`. Python gRPC is fastest near 512 KiB.
STREAM_PIECE_BYTES = 512 * 1024
#: Cap of any gRPC message. Headers and step records are the largest things that travel this way.
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
#: Cap of a request to a data process: a layout of some 400 GB, or the digests of a shard of half a million chunks.
REQUEST_BYTES_MAX = 16 * 1024 * 1024
#: A layout is sent in one request; of a state whose layout is larger the chunks go without what is in them.
LAYOUT_BYTES_MAX = REQUEST_BYTES_MAX * 3 // 4
#: A state header beyond this is refused: 10,000 tensors need about 1 MiB.
HEADER_BYTES_MAX = 256 * 1024 * 1024
#: Tensors start at multiples of this in a segment: a cache line, and any dtype's alignment.
TENSOR_ALIGNMENT_BYTES = 64
#: What the SDK lays out as one chunk has at most this size, header chunks included. Three fp32 tensors'
#: slices of it still fit a core's share of the cache together with what decoding them needs.
LAYOUT_CHUNK_BYTES = 4 << 20
#: Version of StateLayout.
LAYOUT_SCHEMA = 1
#: World size at most: what one commit carries is some 20,000 ranks, and the registry remembers who speaks for each.
RANK_MAX = 1 << 15
STEP_MAX = 2**62


def check_name(what: str, name: str) -> str:
    """Return `name` if it may name a job, node or cluster; such names become file names.

    Raises:
        ValueError: it has other characters than letters, digits, `.`, `_`, `-`, has more than 128
            of them or none, or is `.` or `..`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {".", ".."}:
        shown = repr(name if len(str(name)) <= 40 else str(name)[:37] + "...")
        raise ValueError(
            f"{what} {shown} is not a valid name: use 1 to {NAME_BYTES_MAX} of the characters "
            "A-Z a-z 0-9 . _ - (and not '.' or '..')"
        )
    return name


def check_token(token: str) -> str:
    """Return `token` if it has the form of a signed JSON Web Token and a size that will do.

    Raises:
        ValueError: it has not. The message has nothing of it.
    """
    if len(token) > TOKEN_BYTES_MAX:
        raise ValueError(f"a token has at most {TOKEN_BYTES_MAX} bytes")
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            "a token is a signed JSON Web Token: three parts of A-Z a-z 0-9 - _ with dots between"
        )
    return token


def default_runtime_dir() -> Path:
    """Folder of the daemon's sockets when nobody says otherwise.

    `/run/fastcheck` for root, as systemd's RuntimeDirectory makes it; else below XDG_RUNTIME_DIR,
    else a folder of this user's own in the temporary directory.
    """
    if os.geteuid() == 0:
        return Path("/run/fastcheck")
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / "fastcheck"
    return Path(tempfile.gettempdir()) / f"fastcheck-{os.geteuid()}"


def default_address() -> str:
    """Address of this node's daemon when FASTCHECK_ADDRESS is not set."""
    return f"unix://{default_runtime_dir() / 'fastcheckd.sock'}"
