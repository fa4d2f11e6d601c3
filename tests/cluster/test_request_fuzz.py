"""Every request of every service, with anything in it, against a real daemon: each gets an answer, none a defect.

How many were tried, and what was found: docs/security.md. Some of these requests do what they ask for: the node is
drained, other nodes register. So this one has a cluster of its own, and nothing else uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.harness import until
from tests.fuzzing import damaged, examples, messages

from fastcheck.local import LocalCluster
from fastcheck_proto.v1 import (
    admin_pb2,
    node_pb2,
    observe_pb2,
    peer_pb2,
    registry_pb2,
    trainer_pb2,
)

MODULES = (admin_pb2, trainer_pb2, peer_pb2, registry_pb2, observe_pb2, node_pb2)
SERVICES = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
#: Answers that a caller can go by. What is not among them says nothing, or that something is broken here.
CLEAN = set(grpc.StatusCode) - {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNIMPLEMENTED,
}
#: Some calls wait, for a step, a leader or for ever.
CALL_S = 0.4
ANSWERS_READ = 3


@dataclass(frozen=True)
class Target:
    cluster: LocalCluster
    #: Service → the addresses where it is served.
    addresses: dict[str, list[str]]
    #: Names that mean something here.
    known: list[str]
    pids: list[int]
    numbers: Iterator[int] = field(default_factory=itertools.count)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with LocalCluster(tmp_path_factory.mktemp("fuzz")) as cluster:
        cluster.up(1, tolerate=1, ram_budget="64MiB")
        config = yaml.safe_load((cluster.dir / "node-0" / "config.yaml").read_text())
        run = Path(config["runtime_dir"])
        agent, data, near = (
            f"127.0.0.1:{config['agent_port']}", f"127.0.0.1:{config['data_port']}", f"unix://{run}/data.sock",
        )  # fmt: skip
        voter = config["voters"][0]
        yield Target(
            cluster,
            {
                "AdminService": [agent, f"unix://{run}/fastcheckd.sock"],
                "NodeService": [agent],
                "PeerService": [data],
                "TrainerService": [near, data],
                "DataControlService": [near],
                "ObserveService": [near, f"unix://{run}/registry.sock"],
                "RegistryService": [voter["registry_address"]],
            },
            ["node-0", "job", "begun-0", config["cluster_id"], voter["registry_address"]],
            cluster.pids("node-0"),
        )


def test_every_service_is_served_somewhere(target: Target) -> None:
    assert {service.name for service in SERVICES} == set(target.addresses)


def ask(channel: grpc.Channel, method: MethodDescriptor, requests: list[bytes]) -> grpc.StatusCode:
    """Call with these bytes; how it ended, or OK after some answers of a stream."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call: Any = getattr(channel, kind)(path)
    try:
        answer = call(iter(requests) if method.client_streaming else requests[0], timeout=CALL_S)
        if method.server_streaming:
            for _ in zip(range(ANSWERS_READ), answer, strict=False):
                pass
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


#: The one that is the agent's alone comes last: it may make the data process believe that it is in another life.
LAST = "DataControlService"


@pytest.mark.parametrize("service", sorted(SERVICES, key=lambda s: s.name == LAST), ids=lambda s: s.name)
def test_any_request_gets_an_answer(target: Target, service: ServiceDescriptor) -> None:
    outcomes: set[grpc.StatusCode] = set()

    @examples(25)
    @given(st.data())
    def any_request(data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(channels)))
        method = data.draw(st.sampled_from(list(service.methods)))
        given_messages = [
            data.draw(damaged(data.draw(messages(method.input_type, target.known)).SerializeToString()))
            for _ in range(data.draw(st.integers(1, 3)) if method.client_streaming else 1)
        ]
        if method.name == "Session" and data.draw(st.booleans()):  # what follows is to get as far as possible
            opening = {"job": f"begun-{next(target.numbers)}", "world_size": 1, "client_id": "x"}
            given_messages.insert(0, trainer_pb2.TrainerMessage(open=opening).SerializeToString())
        code = ask(channels[address], method, given_messages)
        outcomes.add(code)
        assert code in CLEAN, f"{method.full_name} answered {code}"

    channels = {address: grpc.insecure_channel(address) for address in target.addresses[service.name]}
    try:
        any_request()
    finally:
        for channel in channels.values():
            channel.close()
    assert outcomes - {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}, "nothing was answered"
    log = target.cluster.log_file("node-0").read_text()
    assert "Traceback" not in log
    assert all(len(line) < 20_000 for line in log.splitlines())
    assert target.cluster.pids("node-0") == target.pids, "a process ended"
    until(lambda: is_answering(target), "the daemon to answer", timeout_s=30)


def is_answering(target: Target) -> bool:
    with grpc.insecure_channel(target.addresses["NodeService"][0]) as channel:
        method = node_pb2.DESCRIPTOR.services_by_name["NodeService"].methods_by_name["Describe"]
        return ask(channel, method, [b""]) is grpc.StatusCode.OK
