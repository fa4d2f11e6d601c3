"""Follows the nodes' states through the admin service of those that live, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..admin import AdminClient
from ..errors import FastCheckError

_CALM_S = 0.3
_CLOSE_S = 0.03


class NodeWatch:
    """Polls `nodes` and remembers what it saw. A context manager; ends its thread at the end.

    Args:
        addresses: node id → address of its agent.
        on_nodes: told each answer's nodes.
    """

    def __init__(self, addresses: dict[str, str], on_nodes: Callable[[list[dict[str, Any]]], None]) -> None:
        self._addresses = addresses
        self._on_nodes = on_nodes
        self._suspects: frozenset[str] = frozenset()
        self._states: dict[str, str] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def __enter__(self) -> NodeWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def expect_loss(self, node_ids: Sequence[str]) -> None:
        """These nodes are about to die: ask others, and look closely."""
        with self._changed:
            self._suspects = frozenset(node_ids)

    def calm(self) -> None:
        """Nothing is expected to die any more."""
        self.expect_loss(())

    def wait_down(self, node_id: str, timeout_s: float) -> float:
        """When the admin view first showed the node DOWN, on the monotonic clock.

        Raises:
            TimeoutError: it did not in `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._states.get(node_id) == "DOWN", timeout_s):
                raise TimeoutError(f"{node_id} is not DOWN {timeout_s:g} s after it was killed")
        return time.monotonic()

    def _run(self) -> None:
        clients = {name: AdminClient(address, timeout_s=2.0) for name, address in self._addresses.items()}
        try:
            while not self._stop.is_set():
                for name, client in clients.items():
                    if name in self._suspects:
                        continue
                    try:
                        nodes = client.nodes()["nodes"]
                    except FastCheckError:
                        continue  # the next node may know; that one is gone shows in its answer
                    with self._changed:
                        self._states = {node["node_id"]: node["state"] for node in nodes}
                        self._changed.notify_all()
                    self._on_nodes(nodes)
                    break
                self._stop.wait(_CLOSE_S if self._suspects else _CALM_S)
        finally:
            for client in clients.values():
                client.close()
