"""Asking real daemons over HTTP, as Prometheus and probes do."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from fastcheck.local import LocalCluster

Samples = dict[tuple[str, ...], float]


def address(cluster: LocalCluster, node: str) -> str:
    """host:port of a node's HTTP port."""
    found: str = next(n["metrics_address"] for n in cluster.status()["nodes"] if n["node_id"] == node)
    return found


def get(cluster: LocalCluster, node: str, path: str) -> tuple[int, str]:
    """Status and body, of a node."""
    return ask(address(cluster, node), path)


def ask(target: str, path: str) -> tuple[int, str]:
    """Status and body, at host:port."""
    try:
        with urllib.request.urlopen(f"http://{target}{path}", timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics(cluster: LocalCluster, node: str) -> Samples:
    """(name, label values...) → value."""
    status, text = get(cluster, node, "/metrics")
    assert status == 200
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
