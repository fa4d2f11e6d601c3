"""What three real voters answered to several clients at once, while leaders are killed and frozen, has one right order.

The history is recorded at the clients and checked by `linearizability.py`. `FASTCHECK_HISTORY_SEED` replays what was
drawn.
"""

import asyncio
import dataclasses
import os
import random
import signal

import pytest
from tests.cluster.linearizability import Operation, check
from tests.cluster.registry_actors import Rank, eventually, leader_of, nodes
from tests.cluster.registry_process import RegistryCluster

from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheckd.counters import Counters
from fastcheckd.errors import FastCheckdError, FencedError, NotNewerError, SupersededError
from fastcheckd.registry.client import RegistryClient

SEED = int(os.environ.get("FASTCHECK_HISTORY_SEED", str(random.randrange(10**6))))
JOBS, WRITERS, READERS = ("gpt", "bert"), 2, 2
TIMEOUT_S = 8.0
FENCED = common_pb2.ERROR_CODE_FENCED
PASSED = {common_pb2.ERROR_CODE_NOT_NEWER, common_pb2.ERROR_CODE_SUPERSEDED}


class Recorder:
    """One client with a connection of its own, and what it was told."""

    def __init__(self, name, config, history):
        self.name, self.history = name, history
        self.counters = Counters()
        self.client = RegistryClient(config, self.counters)

    async def record(self, operation, call):
        """Note `operation` with what `call` makes of it; when it cannot say whether it happened, with no end."""
        loop = asyncio.get_running_loop()
        operation = Operation(client=self.name, called_at=loop.time(), **operation)
        try:
            told = await call()
        except FastCheckdError as error:
            told = {"lost": True, "why": error}
        if told.pop("lost", False):
            if operation.kind != "lookup":
                self.history.append(operation)
            await asyncio.sleep(0.05)
            return None
        operation = dataclasses.replace(operation, returned_at=loop.time(), **told)
        self.history.append(operation)
        return operation

    @property
    def retries(self):
        return self.counters.snapshot().get("registry_retries", 0)


class Writer(Recorder):
    """A process that takes the job's seat now and then, and commits one step after the other."""

    def __init__(self, name, config, history, owner, job, steps, seed):
        super().__init__(name, config, history)
        self.rank = Rank(self.client, owner, 0, 1, job=job)
        self.steps = steps  # of the whole job, so that writers compete for the next ones
        self.random = random.Random(seed)
        self.lives = 0

    async def run(self, stop):
        seated = False
        while not stop.is_set():
            if self.rank.owner.fenced.is_set():
                self.rank.owner.fenced.clear()
                await self.rank.owner.register(self.client)
            if not seated or self.random.random() < 0.1:
                seated = await self.record({"kind": "open"}, self.open) is not None
                continue
            step = self.steps[0] + self.random.choice((0, 1, 1, 1))
            asked = {"kind": "commit", "step": step, "session": self.rank.session}
            told = await self.record(asked, lambda step=step: self.commit(step))
            seated = told is not None and told.outcome != "fenced"
            if told is None or told.outcome == "committed":
                self.steps[0] = max(self.steps[0], step)
            # Not a wait: the two writers shall not keep in step.
            await asyncio.sleep(self.random.random() * 0.02)

    async def open(self):
        self.lives += 1
        return {"session": await self.rank.open(f"{self.name}-{self.lives}")}

    async def commit(self, step):
        asked, before = 0, self.retries
        try:
            request = self.rank.request(step, await self.rank.place(step))
            while True:
                asked += 1
                answer = await self.client.report(request, timeout_s=TIMEOUT_S)
                if answer.state == registry_pb2.REPORT_STATE_COMMITTED:
                    return {"outcome": "committed"}
                if answer.state == registry_pb2.REPORT_STATE_REFUSED:
                    break
            code, message = answer.error.code, answer.error.message
        except (FencedError, NotNewerError, SupersededError) as error:
            code, message = error.code, str(error)
        if asked > 1 or self.retries != before:
            return {"lost": True}  # an earlier try may have done it
        if code == FENCED and "another process" in message:
            return {"outcome": "fenced"}
        return {"outcome": "not newer"} if code in PASSED else {"lost": True}


class Reader(Recorder):
    """Asks for the newest step of a job again and again."""

    def __init__(self, name, config, history, job):
        super().__init__(name, config, history)
        self.job = job

    async def run(self, stop):
        while not stop.is_set():
            await self.record({"kind": "lookup"}, self.look)
            await asyncio.sleep(0.01)

    async def look(self):
        found = await self.client.lookup(registry_pb2.LookupRequest(job=self.job), timeout_s=TIMEOUT_S)
        return {"step": found.record.step}


@pytest.fixture
def cluster(tmp_path):
    cluster = RegistryCluster(tmp_path, 3)
    cluster.start_all()
    yield cluster
    cluster.stop_all()


async def committed(history, more):
    """Wait until that many further commits are known."""

    def count():
        return sum(operation.outcome == "committed" for operation in history)

    wanted = count() + more
    await eventually(lambda: count() >= wanted, 40, f"{more} more commits")


@pytest.mark.timeout(240)
def test_what_clients_were_told_while_leaders_died_has_one_right_order(cluster):
    print(f"FASTCHECK_HISTORY_SEED={SEED}")
    histories = {job: [] for job in JOBS}

    async def scenario():
        config, stop = cluster.config, asyncio.Event()
        asking = Recorder("the test", config, [])
        async with nodes(asking.client, config, 4) as started:
            actors = []
            for number, job in enumerate(JOBS):
                history, steps = histories[job], [1]
                for i in range(WRITERS):
                    name, owner = f"{job} writer {i}", started[number * WRITERS + i]
                    actors.append(Writer(name, config, history, owner, job, steps, SEED + len(actors)))
                actors += [Reader(f"{job} reader {i}", config, history, job) for i in range(READERS)]
            tasks = [asyncio.create_task(actor.run(stop)) for actor in actors]
            for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP):
                for history in histories.values():
                    await committed(history, 8)
                hurt = await leader_of(asking.client)
                if how is signal.SIGKILL:
                    cluster.kill(hurt)
                else:
                    cluster.processes[hurt].send_signal(signal.SIGSTOP)
                for history in histories.values():
                    await committed(history, 2)
                if how is signal.SIGKILL:
                    cluster.start(hurt)
                else:  # and it still believes that it leads
                    cluster.processes[hurt].send_signal(signal.SIGCONT)
            for history in histories.values():
                await committed(history, 8)
            stop.set()
            await asyncio.wait(tasks, timeout=30)
            assert not [task for task in tasks if not task.done()]
            for task in tasks:
                task.result()
        for actor in [*actors, asking]:
            await actor.client.close()

    asyncio.run(scenario())
    for job, history in histories.items():
        kinds = {o.kind if o.kind != "commit" else o.outcome or "unknown" for o in history}
        assert {"open", "lookup", "committed", "fenced"} <= kinds, kinds
        verdict = check(history)
        assert verdict.linearizable, f"{job}, seed {SEED}: {verdict}"
        told = [o for o in history if o.kind == "lookup"]
        # The checker looks at this very history: had one reader been told of the step before, it would say so.
        last = dataclasses.replace(told[-1], step=0)
        assert not check([last if o is told[-1] else o for o in history]).linearizable
