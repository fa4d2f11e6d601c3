"""What a node tells of what it holds when a life begins; the store and the registry are lists here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.counters import Counters
from fastcheckd.identity import NodeLife
from fastcheckd.maintenance.inventory import Inventory

DEADLINE_S = 10.0


def held(step):
    key = pb.ShardKey(job="gpt", step=step, rank=0, shard=0)
    return SimpleNamespace(
        id=(pb.REPLICA_KIND_COPY, "gpt", step, 0, 0),
        key=key,
        kind=pb.REPLICA_KIND_COPY,
        manifest=pb.ShardManifest(key=key, digest=bytes(16)),
        verified_at_ms=1,
    )


class Node:
    """A data process' inventory, and what the registry heard from it."""

    def __init__(self, steps):
        self.kept = None
        self.told = []
        self.replicas = [held(step) for step in steps]
        self.identity = NodeLife("node-0")
        self.inventory = Inventory(
            identity=self.identity,
            store=SimpleNamespace(held=lambda: list(self.replicas)),
            registry=self,
            checker=None,
            counters=Counters(),
            kept_steps=lambda: self.kept,
        )

    async def report_inventory(self, request, timeout_s):
        self.told.append([entry.key.step for entry in request.entries])
        return rpb.ReportInventoryResponse(adopted=len(request.entries))

    async def sees(self, kept, told):
        """A view comes; wait until the registry has heard `told`."""
        self.kept = {"gpt": kept}
        self.inventory.changed()
        async with asyncio.timeout(DEADLINE_S):
            while self.told != told:
                await asyncio.sleep(0.01)


def test_steps_that_only_a_later_view_names_are_told_then_and_each_once():
    async def story():
        node = Node([4, 5])
        working = asyncio.create_task(node.inventory.run())
        node.identity.assume(7)
        await node.sees([], [[]])  # a voter that lags behind knows of no step
        await node.sees([4, 5], [[], [5, 4], []])
        node.replicas.append(held(6))  # came in this life: the commit names it
        await node.sees([5, 6], [[], [5, 4], []])
        node.identity.assume(8)
        await node.sees([5, 6], [[], [5, 4], [], [6, 5], []])
        working.cancel()

    asyncio.run(story())


def test_what_a_restore_brought_here_is_told_in_the_same_life():
    async def story():
        node = Node([4])
        working = asyncio.create_task(node.inventory.run())
        node.identity.assume(7)
        await node.sees([4, 5], [[4], []])
        node.replicas.append(held(5))
        node.inventory.brought([node.replicas[-1]])
        await node.sees([4, 5], [[4], [], [5], []])
        working.cancel()

    asyncio.run(story())
