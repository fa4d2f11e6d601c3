"""What a cluster shows to those who watch, before and while it is hurt. One cluster: each test leaves it whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.cluster.harness import Job, leader, paused, process_of, until
from tests.cluster.observed import ask, get, metrics
from tests.cluster.prometheus import scraping

from fastcheck.local import LocalCluster, LocalClusterError
from fastcheck.local.ports import find_free_ports
from fastcheckd.counters import NAMES

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "fastcheck.rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "fastcheck.json"
#: Told only where there is something to tell.
ABSENT_WHEN_WELL = {"fastcheck_certificate_expiry_timestamp_seconds"}
NODES = ["node-0", "node-1", "node-2", "node-3"]
STEPS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("observed") / "cluster") as made:
        made.up(len(NODES), tolerate=1, ram_budget="256MiB", settings={"data_hung_after_s": 1.0})
        job = Job(made, NODES)
        for step in range(1, STEPS + 1):
            job.commit(step)
        job.start()
        assert job.load() == STEPS
        job.stop()
        yield made


def config_of(cluster: LocalCluster, node: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((cluster.dir / node / "config.yaml").read_text())
    return found


def ready(cluster: LocalCluster, node: str) -> tuple[int, list[str]]:
    status, body = get(cluster, node, "/readyz")
    return status, json.loads(body)["reasons"]


def check(target: str, service: str = "") -> int:
    """What gRPC's health service says of a service; the empty name is the server itself."""
    with grpc.insecure_channel(target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=10
        )
        return int(answer.status)


def test_a_node_tells_what_it_did(cluster):
    found = metrics(cluster, "node-1")
    assert found["fastcheck_node_info", config_of(cluster, "node-1")["cluster_id"], "node-1"] == 1
    assert found["fastcheck_saves_staged_total",] == STEPS
    assert found["fastcheck_saves_committed_total",] == STEPS
    assert found["fastcheck_staged_bytes_total",] >= STEPS << 20
    assert found["fastcheck_replicated_bytes_total",] >= STEPS << 20
    assert found["fastcheck_restores_total",] == 1
    for kind in ("staged", "replicated", "committed"):
        assert found[f"fastcheck_job_{kind}_step", "gpt"] == STEPS
    for stage in ("save_wait", "save_copy", "save_replicate", "save_commit"):
        assert found[f"fastcheck_{stage}_seconds_count",] == STEPS
        assert found[f"fastcheck_{stage}_seconds_sum",] > 0
    assert found["fastcheck_restore_seconds_count",] == 1
    assert found["fastcheck_heartbeat_gap_seconds_count",] > 0
    assert found["fastcheck_ram_used_bytes",] > 0
    assert found["fastcheck_replicas_held", "owner"] > 0
    totals = {name for name, *_ in found if name.endswith("_total")}
    assert len(totals) >= len(NAMES)


def test_one_voter_leads_and_tells_of_the_cluster(cluster):
    up = ("fastcheck_cluster_nodes", "UP")
    until(
        lambda: metrics(cluster, leader(cluster, "node-3")).get(up) == len(NODES),
        "nobody to be suspected of being busy",
    )
    found = {node: metrics(cluster, node) for node in NODES}
    leads = [node for node in NODES if found[node].get(("fastcheck_registry_is_leader",)) == 1]
    assert leads == [leader(cluster, "node-3")]
    told = found[leads[0]]
    assert told["fastcheck_cluster_nodes", "UP"] == len(NODES)
    assert told["fastcheck_cluster_job_committed_step", "gpt"] == STEPS
    assert told["fastcheck_cluster_shards_short",] == 0
    assert told["fastcheck_registry_commit_seconds_count",] > STEPS
    assert ("fastcheck_registry_term",) not in found["node-3"]  # no voter, no registry process
    assert ("fastcheck_process_answers", "registry") not in found["node-3"]


def test_a_node_that_is_well_is_live_ready_and_may_be_stopped(cluster):
    assert get(cluster, "node-3", "/livez") == (200, "ok\n")
    assert until(lambda: ready(cluster, "node-3") == (200, []), "node-3 to be ready")
    status, body = get(cluster, "node-3", "/safe-to-stop")
    # A job of four ranks on four nodes: its own copies are on the others, theirs would be one short.
    assert status == 412 and json.loads(body)["jobs"] == ["gpt"] and json.loads(body)["survivable"]


def test_grpc_health_on_every_port(cluster):
    config = config_of(cluster, "node-0")
    voter = next(v for v in config["voters"] if v["node_id"] == "node-0")
    serving = health_pb2.HealthCheckResponse.SERVING
    targets = {
        "agent": f"127.0.0.1:{config['agent_port']}",
        "data": f"127.0.0.1:{config['data_port']}",
        "registry": voter["registry_address"],
        "http": config["metrics_address"],
    }
    assert {name: check(target) for name, target in targets.items()} == dict.fromkeys(targets, serving)
    until(lambda: check(targets["agent"], "ready") == serving, "node-0 to be ready")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (apt install prometheus)")
def test_prometheus_scrapes_and_every_expression_of_the_dashboard_and_the_alerts_holds(cluster, tmp_path):
    job = Job(cluster, NODES, name="scraped")
    steps = itertools.count(1)
    with scraping(cluster, tmp_path, RULES) as prometheus:

        def rated() -> bool:
            job.commit(next(steps))  # a rate needs two scrapes between which something moved
            return len(prometheus.query("rate(fastcheck_saves_committed_total[1m]) > 0")) == len(NODES)

        until(rated, "a rate of commits at every node")
        job.load()
        job.stop()
        until(lambda: prometheus.query("fastcheck_restores_total > 1"), "the loads to be scraped")
        known = set(prometheus.ask("label/__name__/values"))
        empty = []
        for expression in [*dashboard_expressions(), *alert_expressions()]:
            named = set(re.findall(r"\bfastcheck_\w+", expression))
            assert named, expression
            assert named - known <= ABSENT_WHEN_WELL, expression
            if not prometheus.query(expression) and expression in dashboard_expressions():
                empty.append(expression)
        assert not empty  # a panel without data would look like a panel that is broken
        groups = prometheus.ask("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) == len(alert_expressions())
        until(
            lambda: all(r["health"] == "ok" for g in prometheus.ask("rules")["groups"] for r in g["rules"]),
            "all rules to be evaluated",
        )
        firing = [
            alert["labels"] for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"
        ]
        assert not firing


def dashboard_expressions() -> list[str]:
    """Of all panels, with Grafana's variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [e.replace("$__rate_interval", "1m").replace("$cluster", ".*") for e in found]


def alert_expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_a_frozen_data_process_costs_its_metrics_and_readiness_and_not_life(cluster):
    agent = f"127.0.0.1:{config_of(cluster, 'node-3')['agent_port']}"
    with paused(process_of(cluster, "node-3", "data")):
        # A scrape's answer is good for whoever asks in the same moment.
        until(
            lambda: metrics(cluster, "node-3")["fastcheck_process_answers", "data"] == 0,
            "its silence to show",
        )
        assert ("fastcheck_ram_used_bytes",) not in metrics(cluster, "node-3")
        assert get(cluster, "node-3", "/livez") == (200, "ok\n")
        until(lambda: ready(cluster, "node-3")[0] == 503, "node-3 to be unready")
        assert any("data process" in reason for reason in ready(cluster, "node-3")[1])
        until(
            lambda: check(agent, "ready") == health_pb2.HealthCheckResponse.NOT_SERVING,
            "gRPC's health service to say so",
        )
    until(lambda: ready(cluster, "node-3")[0] == 200, "node-3 to be ready again")
    until(lambda: metrics(cluster, "node-3")["fastcheck_process_answers", "data"] == 1, "its answers to show")


def test_without_a_quorum_a_node_lives_is_not_ready_and_does_not_say_that_it_may_be_stopped(cluster):
    # Killed and not frozen: their agents would start frozen ones anew.
    for voter in ("node-0", "node-1"):
        cluster.kill(voter)
    until(lambda: any("majority" in r for r in ready(cluster, "node-3")[1]), "node-3 to miss the quorum")
    assert get(cluster, "node-3", "/livez") == (200, "ok\n")
    status, body = get(cluster, "node-3", "/safe-to-stop")
    assert status == 503 and json.loads(body)["safe"] is None
    until(lambda: metrics(cluster, "node-3")["fastcheck_node_has_quorum",] == 0, "the metric to say so")
    with contextlib.suppress(LocalClusterError):  # it cannot become UP without the other
        cluster.start("node-0", timeout_s=2)
    cluster.start("node-1")
    until(lambda: ready(cluster, "node-3")[0] == 200, "node-3 to be ready again")


def test_the_health_port_answers_the_questions_and_tells_no_numbers(cluster):
    (port,) = find_free_ports(1)
    path = cluster.dir / "node-3" / "config.yaml"
    path.write_text(yaml.safe_dump(config_of(cluster, "node-3") | {"health_address": f"127.0.0.1:{port}"}))
    cluster.kill("node-3")
    cluster.start("node-3")

    def reachable() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return check(f"127.0.0.1:{port}", "ready") == health_pb2.HealthCheckResponse.SERVING
        return False

    until(reachable, "the health port to say that node-3 is ready")
    assert ask(f"127.0.0.1:{port}", "/livez") == (200, "ok\n")
    assert ask(f"127.0.0.1:{port}", "/readyz")[0] == 200
    assert ask(f"127.0.0.1:{port}", "/metrics")[0] == 404
