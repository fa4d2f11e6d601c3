"""Processes at some moment, for the tests of what is told of them."""

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.counters import Counters
from fastcheckd.durations import AGENT, DATA, REGISTRY, Durations
from fastcheckd.observe import agent_metrics, data_metrics, registry_metrics
from fastcheckd.observe.agent_metrics import NodeFacts, ProcessFacts, ProcessUsage
from fastcheckd.observe.data_metrics import DataFacts
from fastcheckd.observe.registry_metrics import LeaderFacts, VoterFacts
from fastcheckd.save.job_progress import JobProgress


def job(name="gpt", **values):
    known = {
        "in_flight": 1, "staged_step": 7, "staged_age_s": 1.0, "replicated_step": 6, "committed_step": 5,
        "committed_age_s": 3.0, "interval_s": 2.0,
    }  # fmt: skip
    return JobProgress(job=name, **{**known, **values})


def node_facts(**values):
    known = {
        "incarnation": 3, "data": rpb.DATA_HEALTH_OK, "not_up": "", "has_quorum": True,
        "processes": (ProcessFacts("agent", 1, 0), ProcessFacts("data", 2, 4)),
    }  # fmt: skip
    return NodeFacts(**{**known, **values})


def data_facts(**values):
    known = {
        "counters": Counters().snapshot(), "durations": Durations(DATA).families(), "ram_used_bytes": 10,
        "ram_free_bytes": 5, "ram_budget_bytes": 100, "scrub_age_s": 2.0, "scrub_period_s": 3600.0,
        "replicas": {"owner": 2, "copy": 4}, "copies_arriving": 0, "seats": 1, "jobs": [job()],
        "job_ram_bytes": {"gpt": 7}, "job_budget_bytes": 60,
    }  # fmt: skip
    return DataFacts(**{**known, **values})


def voter_facts(*, leads=True, **values):
    up, down = rpb.NODE_STATE_UP, rpb.NODE_STATE_DOWN
    view = rpb.ClusterView(
        nodes=[
            rpb.NodeRecord(node_id="a", state=up, heard_ms_ago=120),
            rpb.NodeRecord(node_id="b", state=up, heard_ms_ago=50),
            rpb.NodeRecord(node_id="c", state=down, heard_ms_ago=99_000),
        ],
        jobs=[rpb.JobView(job="gpt", kept_steps=[4, 5])],
    )
    copies = rpb.GetRedundancyResponse(short_shards=3, short_bytes=30, repairing=1, wanted_copies=2)
    leading = LeaderFacts(view=view, redundancy=copies, short_shards={"gpt": 3}) if leads else None
    known = {
        "has_leader": True,
        "term": 2,
        "epoch": 9,
        "schema": 4,
        "voters": 3,
        "durations": Durations(REGISTRY).families(),
    }
    return VoterFacts(**{**known, "leading": leading, **values})


def agent_families(**values):
    known = {
        "cluster_id": "c", "node_id": "n", "ready": True, "usage": {"agent": ProcessUsage(1, 2.0)},
        "answered": {"data": True}, "durations": Durations(AGENT).families(), "certificate_ends_at_s": 1e9,
    }  # fmt: skip
    return agent_metrics.families(node_facts(), **{**known, **values})


def all_families():
    """Whatever a node can tell, by process."""
    return {
        "agent": agent_families(),
        "data": data_metrics.families(data_facts()),
        "registry": registry_metrics.families(voter_facts()),
    }
