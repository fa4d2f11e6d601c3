"""The agent's own metrics: who the node is, its processes, its touch with the registry. Pure."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from fastcheck_proto.v1 import registry_pb2 as rpb

from .. import __version__
from .families import counter, gauge

#: Why a node is not ready: what makes it so mends itself, or needs somebody; a restart would only add its own time.
_DATA = {
    rpb.DATA_HEALTH_UNSPECIFIED: "the data process has not been heard of",
    rpb.DATA_HEALTH_STARTING: "the data process is starting: it adopts what the RAM directory holds",
    rpb.DATA_HEALTH_GONE: "the data process has ended; another one is to be started",
    rpb.DATA_HEALTH_HUNG: "the data process is there and makes no progress",
}


@dataclass(frozen=True)
class ProcessFacts:
    """One of the node's processes."""

    name: str
    #: None: it does not run now.
    pid: int | None
    restarts: int
    start_failures: int = 0
    #: Why it does not run as it should, to be read after its name; empty: it does.
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """How a node is, as far as its agent knows by itself."""

    #: 0: not registered yet.
    incarnation: int
    data: rpb.DataHealth.ValueType
    #: Why the registry's newest view does not call this life UP; empty: it does.
    not_up: str
    #: A majority of the voters answers this node's heartbeats.
    has_quorum: bool
    processes: tuple[ProcessFacts, ...] = ()

    @property
    def troubles(self) -> list[str]:
        """A sentence for each process that does not run as it should."""
        return [f"the {p.name} process {p.trouble}" for p in self.processes if p.trouble]

    def why_not_ready(self) -> list[str]:
        """Why the node takes no work that it could take, a sentence each; none: it is ready."""
        reasons = []
        if self.data != rpb.DATA_HEALTH_OK:
            reasons.append(_DATA[self.data])
        reasons.extend(self.troubles)
        if not self.incarnation:
            return [*reasons, "the registry has not registered this node yet"]
        if not self.has_quorum:
            reasons.append("no majority of the registry's voters answers this node")
        if self.not_up:
            reasons.append(self.not_up)
        return reasons


@dataclass(frozen=True)
class ProcessUsage:
    """What a process takes of the machine, by the kernel."""

    resident_bytes: int
    cpu_s: float


def families(
    facts: NodeFacts,
    *,
    cluster_id: str,
    node_id: str,
    ready: bool,
    usage: Mapping[str, ProcessUsage],
    answered: Mapping[str, bool],
    durations: Sequence[Metric],
    certificate_ends_at_s: float | None,
) -> list[Metric]:
    """Everything, for one scrape.

    Args:
        usage: process → what it takes, of those that run.
        answered: process → whether its own metrics came, of those that were asked.
        certificate_ends_at_s: when the node's certificate expires, Unix seconds; None: it has none.
    """
    version: dict[tuple[str, ...], float] = {(__version__, platform.python_version()): 1.0}
    return [
        gauge("build_info", "Version of FastCheck and of Python.", version, ("version", "python")),
        gauge("node_info", "Who this is.", {(cluster_id, node_id): 1.0}, ("cluster_id", "node_id")),
        gauge("node_ready", "1: registered, UP, and its store adopted; /readyz has the reasons.", int(ready)),
        gauge("node_incarnation", "This life of the node; 0: not registered yet.", facts.incarnation),
        gauge("node_has_quorum", "1: a majority of the voters answers this node.", int(facts.has_quorum)),
        gauge(
            "process_answers",
            "1: the process answered this scrape; its metrics are missing where it did not.",
            {(name,): int(ok) for name, ok in answered.items()},
            ("process",),
        ),
        counter(
            "process_restarts",
            "Times that the agent started the process anew.",
            {(p.name,): p.restarts for p in facts.processes if p.name != "agent"},
            ("process",),
        ),
        counter(
            "process_start_failures",
            "Times that the process could not be started.",
            {(p.name,): p.start_failures for p in facts.processes if p.name != "agent"},
            ("process",),
        ),
        gauge(
            "process_resident_bytes",
            "Memory of the process; the data process' mapped segments are part of it.",
            {(name,): used.resident_bytes for name, used in usage.items()},
            ("process",),
        ),
        counter(
            "process_cpu_seconds",
            "CPU seconds of the process, user and system.",
            {(name,): used.cpu_s for name, used in usage.items()},
            ("process",),
        ),
        gauge(
            "certificate_expiry_timestamp_seconds",
            "When this node's certificate ends; absent where it has none.",
            {} if certificate_ends_at_s is None else certificate_ends_at_s,
        ),
        *durations,
    ]
