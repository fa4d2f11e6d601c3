"""A newer schema is proposed when every voter knows it, and once it is agreed on nobody has to be asked again."""

import asyncio

import pytest
from tests.unit.fastcheckd.registry.small_cluster import apply

from fastcheckd.config import Voter
from fastcheckd.errors import UnsafeError
from fastcheckd.registry import model, voters
from fastcheckd.registry.model import SCHEMA, State
from fastcheckd.registry.voters import agree, agree_in_time, is_agreed

NEWER = SCHEMA + 1


@pytest.fixture(autouse=True)
def _newer_version(monkeypatch):
    """This process knows a schema that voters of the version before don't."""
    monkeypatch.setattr(model, "SCHEMA", NEWER)


class Engine:
    """A leader's engine with one state."""

    def __init__(self):
        self.state = State()
        self.proposed = []
        self.voters = tuple(
            Voter(node_id=n, registry_address=f"{n}:5", raft_address=f"{n}:6") for n in ("a", "b", "c")
        )

    def read(self, question):
        return question(self.state)

    async def propose(self, command):
        self.proposed.append(command.WhichOneof("kind"))
        return apply(self.state, command)


class Outward:
    """What the other voters say they know; None: nothing."""

    def __init__(self, **known):
        self.known = known
        self.asked = []

    async def knows_schema(self, voter, timeout_s):
        self.asked.append(voter.node_id)
        return self.known[voter.node_id]


def test_it_is_agreed_when_all_know_it_and_then_nobody_is_asked_again():
    engine, outward = Engine(), Outward(b=NEWER, c=NEWER + 1)
    assert is_agreed(engine, SCHEMA) and not is_agreed(engine, NEWER)
    asyncio.run(agree(engine, "a", outward, NEWER))
    assert is_agreed(engine, NEWER) and outward.asked == ["b", "c"]
    asyncio.run(agree(engine, "a", Outward(b=None, c=0), NEWER))
    assert engine.proposed == ["upgrade"]


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"b": NEWER, "c": 0}, "upgrade c"),
        ({"b": SCHEMA, "c": None}, "upgrade b"),
        ({"b": NEWER, "c": None}, "no answer from c"),
    ],
)
def test_one_that_does_not_know_it_or_is_silent_holds_it_up_and_is_named(known, words):
    engine = Engine()
    with pytest.raises(UnsafeError, match=words):
        asyncio.run(agree(engine, "a", Outward(**known), NEWER))
    assert engine.proposed == [] and engine.state.schema == SCHEMA


def test_it_is_tried_again_until_the_last_voter_is_upgraded(monkeypatch):
    monkeypatch.setattr(voters, "RETRY_S", 0.0)
    engine = Engine()

    class Upgraded(Outward):
        async def knows_schema(self, voter, timeout_s):
            if len(self.asked) == 6:
                self.known["c"] = NEWER
            return await super().knows_schema(voter, timeout_s)

    outward = Upgraded(b=NEWER, c=SCHEMA)
    asyncio.run(agree_in_time(engine, "a", outward, NEWER))
    assert is_agreed(engine, NEWER) and len(outward.asked) == 8
