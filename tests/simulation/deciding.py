"""Whether the registry decides: while a majority of the voters is well, something is committed, whatever the others do.

A voter is well when its process runs and its disk has room. Nothing is asked for while links between voters are bad,
one stands still or has a slow disk: then an election or a leader may take longer than anybody could promise.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.simulation.virtual_time import Process

from fastcheckd.errors import FastCheckdError
from fastcheckd.registry.commands import noop

if TYPE_CHECKING:
    from tests.simulation.machine import Machine, World

LOOK_S = 0.25
#: Longer than an election that has to be repeated once, and an attempt at a commit.
BOUND_S = 3.5


class LeaderCalls:
    """The watcher."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._voters = [machine for machine in world.machines.values() if machine.is_voter]
        #: Who was well at the last look, and since when enough of them are.
        self._well: frozenset[Process] = frozenset()
        self._since = world.loop.now
        self._decided_at = world.loop.now

    async def watch(self) -> None:
        loop = self._world.loop
        while True:
            well = self._who_is_well()
            if len(well & self._well) <= len(self._voters) // 2:
                self._since = loop.now
            self._well = well
            for voter in self._voters:
                process = voter.process("registry")
                if process is not None and voter.raft is not None and voter.raft.is_leader:
                    process.start(self._ask(voter))
            silent_s = loop.now - max(self._since, self._decided_at)
            self._world.truth.check(
                silent_s < BOUND_S,
                "deciding",
                f"nothing was committed for {silent_s:.1f} s, though {sorted(p.name for p in well)} are well",
            )
            await asyncio.sleep(LOOK_S)

    async def _ask(self, voter: Machine) -> None:
        assert voter.raft is not None
        try:
            await voter.raft.propose(noop(), timeout_s=BOUND_S)
        except FastCheckdError:
            return
        self._decided_at = self._world.loop.now

    def _who_is_well(self) -> frozenset[Process]:
        """None while there is trouble that nobody could promise anything in."""
        weather = self._world.network.weather
        processes = [(voter, voter.process("registry")) for voter in self._voters]
        names = {voter.name for voter, process in processes if process is not None}
        bad_links = [*weather.cut, *weather.lossy, *weather.slow]
        if any(a != b and a in names and b in names for a, b in bad_links):
            return frozenset()
        if any(process is not None and process.paused for _, process in processes):
            return frozenset()
        if any(voter.platter.sync_s for voter in self._voters):
            return frozenset()
        return frozenset(p for voter, p in processes if p is not None and not voter.platter.full)
