"""A cluster whose lanes are under TLS commits, loses a node, and restores."""

from __future__ import annotations

import pytest
from tests.certificates import Authority
from tests.cluster.harness import Job
from tests.netlab.lab import Lab

from fastcheck.admin import AdminClient

pytestmark = pytest.mark.usefixtures("network_namespaces")


def test_a_cluster_with_tls_on_its_lanes_survives_a_loss(make_lab, tmp_path) -> None:
    authority = Authority(tmp_path / "ca")
    files = {name: authority.settings("lanes", name) for name in ("node-0", "node-1", "node-2")}
    keys = {key: (lambda node, key=key: str(files[node][key])) for key in files["node-0"]}
    lab: Lab = make_lab(3, cluster_id="lanes", lane_tls=True, **keys)
    job = Job(lab, ["node-2"], megabytes=8)
    job.commit(1)
    with AdminClient(lab.address("node-0"), timeout_s=5) as admin:
        assert all(node["lane"]["tls"] for node in admin.nodes()["nodes"])
    lab.kill("node-2", wipe=True)
    lab.start("node-2")
    job.start()
    assert job.load() == 1
    job.commit(2)
    job.stop()
