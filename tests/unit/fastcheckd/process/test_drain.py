import asyncio

import pytest

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import RegistryError
from fastcheckd.process import drain as drain_module
from fastcheckd.process.drain import drain


class Registry:
    """Answers with one verdict after the other, the last one for ever; None: it does not answer."""

    def __init__(self, *verdicts: rpb.SafeToStopResponse | None) -> None:
        self._verdicts = list(verdicts)
        self.drained: list[str] = []

    async def set_draining(self, request, timeout_s):
        assert request.draining and timeout_s > 0
        self.drained.append(request.node_id)
        return rpb.SetDrainingResponse()

    async def safe_to_stop(self, request, timeout_s):
        verdict = self._verdicts.pop(0) if len(self._verdicts) > 1 else self._verdicts[0]
        if verdict is None:
            raise RegistryError("no leader")
        return verdict


NOT_YET = rpb.SafeToStopResponse(safe=False, reasons=["2 shards are short"])
SAFE = rpb.SafeToStopResponse(safe=True)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(drain_module, "LOOK_INTERVAL_S", 0.01)


def test_it_ends_as_soon_as_nothing_depends_on_the_node():
    registry, said = Registry(NOT_YET, None, NOT_YET, SAFE), []
    assert asyncio.run(drain("a", registry, within_s=20, going_on=said.append))
    assert registry.drained == ["a"]
    assert said == ["2 shards are short", "no leader", "2 shards are short"]


def test_it_ends_with_its_time(caplog):
    assert not asyncio.run(drain("a", Registry(NOT_YET), within_s=0.1))
    assert "stopping undrained after 0.1 s: 2 shards are short" in caplog.text


def test_a_registry_that_cannot_be_asked_is_asked_again():
    class Mute(Registry):
        async def set_draining(self, request, timeout_s):
            if len(self.drained) < 2:
                self.drained.append("in vain")
                raise RegistryError("no leader")
            return await super().set_draining(request, timeout_s)

    registry = Mute(SAFE)
    assert asyncio.run(drain("a", registry, within_s=20))
    assert registry.drained == ["in vain", "in vain", "a"]
