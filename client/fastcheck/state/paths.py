"""Where something lies in the caller's state: a tuple of dict keys and list indexes. Pure."""

from __future__ import annotations

Key = str | int | bool | None
Path = tuple[Key, ...]

#: Levels of containers and objects. A protobuf parser stops at 100 nested messages, three to a dict.
DEPTH_MAX = 30


def show(path: Path) -> str:
    """The path as code that the caller would write: `state['optimizer']['state'][0]`."""
    return "state" + "".join(f"[{_text(key)}]" for key in path)


def dotted(path: Path) -> str:
    """The path as a name for people: `optimizer.state.0`."""
    return ".".join(key if isinstance(key, str) else _text(key) for key in path)


def _text(key: Key) -> str:
    if isinstance(key, int) and key.bit_length() > 4000:  # Python refuses to print far larger ones
        return f"an int of {key.bit_length()} bits"
    return repr(key)
