"""A training job: ranks on machines that save in step and load when they are started anew.

The launcher lives outside of the cluster, as a scheduler does, and nothing of ours can harm it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.data import Data
from tests.simulation.machine import Machine, World
from tests.simulation.saving import Save, load, open_rank, rule_out

IN_FLIGHT_MAX = 2
#: A dead machine's rank is started elsewhere after so long a time.
REPLACED_AFTER_S = 2.0


def ask(machine: Machine, work: Callable[[Data], Coroutine[Any, Any, Any]]) -> asyncio.Future[Any]:
    """Have a machine's data process do something; None when it dies before it has."""
    loop = machine.world.loop
    answer: asyncio.Future[Any] = loop.create_future()
    process = machine.process("data")

    def settle(result: Any) -> None:
        if process is not None:
            process.mourners.pop(answer, None)
        if not answer.done():
            answer.set_result(result)

    async def run() -> None:
        settle(await work(machine.data))

    if process is None:
        answer.set_result(None)
    else:
        process.mourners[answer] = lambda: settle(None)
        process.start(run())
    return answer


class Job:
    """One job's trainers."""

    def __init__(self, world: World, name: str, seats: list[Machine]) -> None:
        self.world = world
        self.name = name
        self.seats = seats
        self.rng = world.rng(f"job/{name}")
        self.step = -1
        #: All trainers are started anew; one rank's alone.
        self.restart = False
        self.takeover: int | None = None
        self._generation = 0
        #: None: its process has not loaded yet, and saves nothing.
        self._sessions: list[int | None] = []
        #: The newest step that each rank's process has loaded or begun to save.
        self._at: list[int] = [-1] * len(seats)
        #: Session → its client; and those sessions that their trainers know to be over.
        self._clients: dict[int, str] = {}
        self._fenced: set[int] = set()
        self._saves: list[list[tuple[Save, asyncio.Task[Any]]]] = [[] for _ in seats]

    async def run(self) -> None:
        while True:
            await self._train()

    async def _train(self) -> None:
        """One generation of trainers, from their start to whatever ends them."""
        self.restart, self.takeover = False, None
        self._generation += 1
        self._sessions = [None] * len(self.seats)  # the processes of before are dead
        await self._find_seats()
        ranks = range(len(self.seats))
        deletions = self.world.truth.deletions[self.name]
        loaded = await asyncio.gather(*(self._begin(rank) for rank in ranks))
        # Whoever has deleted what a job is restored from starts it anew.
        if None in loaded or deletions != self.world.truth.deletions[self.name]:
            await asyncio.sleep(0.2)
            return
        self._check_loaded(loaded)
        self.step = loaded[0]
        while not self.restart and all(seat.alive for seat in self.seats):
            if deletions != self.world.truth.deletions[self.name]:
                return
            await asyncio.sleep(self.rng.uniform(0.3, 1.5))
            if self.takeover is not None:
                rank, self.takeover = self.takeover, None
                if not await self._take_over(rank):
                    return
            if (
                self.rng.random() < 0.03
                and self._fenced.isdisjoint(self._sessions)
                and not await self._load_again()
            ):
                return
            self.step += self.rng.choice((1, 1, 1, 2))
            for rank in ranks:
                if self.rng.random() > 0.03:
                    self.world.loop.call_later(
                        self.rng.uniform(0, 0.2), self._save, rank, self.step, self._sessions[rank]
                    )

    async def _begin(self, rank: int) -> int | None:
        """A rank's new process, at a time of its own: it loads, and may save before others have loaded."""
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0, 3.0))))
        session = await self._open(rank)
        if session is None or (loaded := await self._load(rank)) is None:
            return None
        self._sessions[rank], self._at[rank] = session, loaded
        if self.rng.random() < 0.4:
            self._save(rank, loaded + 1, session)
        found: int = loaded
        return found

    async def _load_again(self) -> bool:
        """All ranks go back to the newest step, without new processes, one after the other."""
        before, self._sessions = self._sessions, [None] * len(self.seats)  # they begin no save meanwhile
        deletions = self.world.truth.deletions[self.name]
        loaded = []
        for rank in self.rng.sample(range(len(self.seats)), len(self.seats)):
            session = await self._open(rank, before[rank], renews=before[rank])
            loaded.append(None if session is None else await self._load(rank))
            self._sessions[rank] = session
        if None in loaded or deletions != self.world.truth.deletions[self.name]:
            return False
        self._check_loaded(loaded)
        self.step, self._at = loaded[0], list(loaded)
        return True

    def _check_loaded(self, loaded: list[Any]) -> None:
        self.world.truth.check(
            len(set(loaded)) == 1, "G2", f"the ranks of {self.name} loaded different steps: {loaded}"
        )

    async def _find_seats(self) -> None:
        give_up_at = self.world.loop.now + REPLACED_AFTER_S
        while not all(seat.alive and seat.process("data") for seat in self.seats):
            await asyncio.sleep(0.2)
            if self.world.loop.now > give_up_at:
                for rank, seat in enumerate(self.seats):
                    others = [m for m in self.world.machines.values() if m.alive and m not in self.seats]
                    if not seat.alive and others:
                        self.seats[rank] = self.rng.choice(others)

    def _open(
        self, rank: int, session: int | None = None, *, loads: bool = True, renews: int = 0
    ) -> asyncio.Future[Any]:
        """A session for a new trainer, or another one for the trainer of a session that has ended, or ends by it."""
        again = session is not None
        client = (
            f"{self.name}-{rank}-{self._generation}-{self.rng.random():.6f}"
            if session is None
            else self._clients[session]
        )
        world_size = len(self.seats)

        def note(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled() and answer.result() is not None:
                self._clients[answer.result()] = client

        opening = ask(
            self.seats[rank],
            lambda data: open_rank(
                data, self.name, rank, world_size, client, again=again, loads=loads, renews=renews
            ),
        )
        opening.add_done_callback(note)
        return opening

    def _load(self, rank: int) -> asyncio.Future[Any]:
        world_size = len(self.seats)
        return ask(self.seats[rank], lambda data: load(data, self.name, rank, world_size))

    async def _take_over(self, rank: int) -> bool:
        """A new process for one rank."""
        session = await self._open(rank)
        if session is None or await self._load(rank) is None:
            return False
        self._sessions[rank] = session
        return True

    def _save(self, rank: int, step: int, session: int | None) -> None:
        if session is None or session != self._sessions[rank]:
            return  # that trainer is gone
        if session in self._fenced:
            self._resume(rank, session)
            return
        if step <= self._at[rank]:
            return  # it was ahead of the others
        self._at[rank] = step
        seat = self.seats[rank]
        process = seat.process("data")
        saves = self._saves[rank] = [(s, t) for s, t in self._saves[rank] if not t.done()]
        if process is None:
            return
        if len(saves) >= IN_FLIGHT_MAX:
            given_up, task = saves.pop(0)
            given_up.data.process.call(task.cancel)
            if self.rng.random() < 0.5:
                process.start(rule_out(seat.data, self.name, rank, session, given_up.step + 1))
        save = Save(seat.data, self.name, step, rank, session, len(self.seats))
        task = process.start(save.run())
        saves.append((save, task))
        task.add_done_callback(lambda _: self._note(save))

    def _note(self, save: Save) -> None:
        if save.outcome == "FencedError":
            self._fenced.add(save.session)

    def _resume(self, rank: int, session: int) -> None:
        """The trainer of a session that has ended takes the rank's place again, if nobody has had it since."""

        def opened(answer: asyncio.Future[Any]) -> None:
            taken = None if answer.cancelled() else answer.result()
            if taken is not None and self._sessions[rank] == session:
                self._sessions[rank] = taken

        self._open(rank, session, loads=False).add_done_callback(opened)
