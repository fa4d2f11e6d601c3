"""How far a segment is filled from its start while several copies into it go on at once. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Front:
    """The first byte of a state that is not copied yet. Parts that are copied apart each know their own.

    `begin` and `end` a part from one thread at a time; any thread may ask.
    """

    def __init__(self, state_bytes: int) -> None:
        self._state_bytes = state_bytes
        #: Where each part begins that is still to come: None once all of it is there.
        self._parts: dict[str, Callable[[], int | None]] = {"all": lambda: 0}

    def begin(self, part: str, first: Callable[[], int | None]) -> None:
        """A part is to come; `first` says which of its bytes is the first that is not there."""
        self._parts = {**self._parts, part: first}

    def wait_for(self, part: str, offset: int) -> None:
        """A part is to come all at once, from `offset` on."""
        self.begin(part, lambda: offset)

    def end(self, part: str) -> None:
        """A part is there, or was handed over to others that have begun."""
        self._parts = {name: first for name, first in self._parts.items() if name != part}

    def reach(self) -> int:
        """So many bytes from the start on are final."""
        firsts = [first() for first in self._parts.values()]
        return min((at for at in firsts if at is not None), default=self._state_bytes)
