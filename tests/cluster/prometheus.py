"""A real Prometheus over a real cluster, and what it is asked."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.harness import until
from tests.cluster.observed import address

from fastcheck.local import LocalCluster
from fastcheck.local.ports import find_free_ports

SCRAPE_JOB = "fastcheck"


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, target: str) -> None:
        self._target = target

    def ready(self) -> bool:
        """Whether it serves queries by now."""
        url = f"http://{self._target}/-/ready"
        # Not listening, or 503.
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(url, timeout=20),
        ):
            return True
        return False

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer; an error is raised with what the server says of it."""
        url = f"http://{self._target}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert answer["status"] == "success" and not answer.get("warnings"), answer
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        """The samples that an expression has now."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found


@contextlib.contextmanager
def scraping(cluster: LocalCluster, folder: Path, rules: Path) -> Iterator[Prometheus]:
    """A server that scrapes all nodes each second and evaluates the rules; there once all nodes are UP to it."""
    (port,) = find_free_ports(1)
    nodes = [address(cluster, node) for node in cluster.node_ids]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": SCRAPE_JOB, "static_configs": [{"targets": nodes}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(f"127.0.0.1:{port}")

    def scraped() -> bool:
        return server.ready() and len(server.query("up == 1")) == len(nodes)

    try:
        until(scraped, "Prometheus to scrape all nodes")
        yield server
    finally:
        process.terminate()
        process.wait(20)
