"""What makes a node unready, and what its pages then say."""

import asyncio
import json

import pytest
from tests.unit.fastcheckd.observe.observe_facts import node_facts

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import NoQuorumError
from fastcheckd.observe import routes
from fastcheckd.observe.routes import CachedAnswer, health_routes, metrics_route


def test_a_node_that_is_up_is_ready():
    assert node_facts().why_not_ready() == []


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"data": rpb.DATA_HEALTH_STARTING}, "adopts"),
        ({"data": rpb.DATA_HEALTH_GONE}, "ended"),
        ({"data": rpb.DATA_HEALTH_HUNG}, "no progress"),
        ({"data": rpb.DATA_HEALTH_UNSPECIFIED}, "not been heard of"),
        ({"incarnation": 0}, "not registered"),
        ({"has_quorum": False}, "majority"),
        ({"not_up": "the registry calls it DRAINING"}, "DRAINING"),
    ],
)
def test_one_thing_that_is_missing_is_named_alone(facts, word):
    (reason,) = node_facts(**facts).why_not_ready()
    assert word in reason


def test_before_it_is_registered_nothing_else_is_expected_of_it():
    facts = node_facts(incarnation=0, has_quorum=False, not_up="no view", data=rpb.DATA_HEALTH_STARTING)
    assert len(facts.why_not_ready()) == 2


def answer(path, facts, verdict=None):
    async def ask():
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    response = asyncio.run(health_routes(lambda: facts, ask)[path]())
    return response.status, response.body


def test_alive_does_not_ask_how_the_rest_is():
    facts = node_facts(incarnation=0, has_quorum=False, data=rpb.DATA_HEALTH_GONE)
    assert answer("/livez", facts) == (200, b"ok\n")


def test_ready_says_why_not():
    assert answer("/readyz", node_facts())[0] == 200
    status, body = answer("/readyz", node_facts(has_quorum=False))
    assert status == 503
    told = json.loads(body)
    assert told["ready"] is False and "majority" in told["reasons"][0]


def test_what_may_be_stopped_is_200_what_may_not_412_and_not_known_503():
    safe = rpb.SafeToStopResponse(safe=True, survivable=True)
    assert answer("/safe-to-stop", node_facts(), safe)[0] == 200
    unsafe = rpb.SafeToStopResponse(safe=False, survivable=True, reasons=["job gpt: ..."], jobs=["gpt"])
    status, body = answer("/safe-to-stop", node_facts(), unsafe)
    assert status == 412 and json.loads(body)["jobs"] == ["gpt"] and json.loads(body)["survivable"]
    status, body = answer("/safe-to-stop", node_facts(), NoQuorumError("no leader"))
    assert status == 503 and json.loads(body) == {"safe": None, "reasons": ["no leader"]}


def test_many_who_ask_at_once_cost_one_question_and_a_later_one_another(monkeypatch):
    asked = []

    async def run():
        may_answer = asyncio.Event()

        async def ask():
            asked.append(len(asked))
            await may_answer.wait()
            return asked[-1]

        shared = CachedAnswer(ask, keep_s=0.0)
        waiting = [asyncio.create_task(shared.get()) for _ in range(20)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one who leaves does not take the answer along
        may_answer.set()
        assert await asyncio.gather(*waiting[1:]) == [0] * 19
        assert await shared.get() == 1

    asyncio.run(run())
    assert asked == [0, 1]


def test_an_answer_is_kept_for_a_moment_errors_included():
    asked = []

    async def run():
        async def ask():
            asked.append(1)
            raise NoQuorumError("no leader")

        shared = CachedAnswer(ask, keep_s=60.0)
        for _ in range(3):
            with pytest.raises(NoQuorumError):
                await shared.get()

    asyncio.run(run())
    assert len(asked) == 1


def test_the_metrics_route_is_prometheus_text():
    async def scrape():
        return b"fastcheck_up 1\n"

    response = asyncio.run(metrics_route(scrape)["/metrics"]())
    assert (response.status, response.body) == (200, b"fastcheck_up 1\n")
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert routes.METRICS_KEPT_S < 1
