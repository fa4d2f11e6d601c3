"""Nodes without a store behind them, for `scale.py`: each registers, sends heartbeats and watches the view.

`python -m tests.benchmarks.scale_nodes CONFIG FIRST COUNT` runs nodes FIRST to FIRST + COUNT - 1 with the daemon's own
code for each of these, says `ready` when all are registered, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.cluster.registry_actors import Node

from fastcheckd.config import Config
from fastcheckd.config_sources import load_config
from fastcheckd.counters import Counters
from fastcheckd.registry.client import RegistryClient


async def watch(client: RegistryClient) -> None:
    """Follow the view as a data process does."""
    async for _ in client.watch():
        pass


async def serve(config: Config, first: int, count: int) -> None:
    """Run the nodes until stdin ends."""
    nodes = []
    async with asyncio.TaskGroup() as group:
        watchers = []
        for number in range(first, first + count):
            client = RegistryClient(config, Counters())
            nodes.append(await Node(config, f"sim-{number}").start(client))
            watchers.append(group.create_task(watch(client)))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for watcher in watchers:
            watcher.cancel()
        for node in nodes:
            await node.stop()


if __name__ == "__main__":
    asyncio.run(serve(load_config(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
