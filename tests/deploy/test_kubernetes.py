"""The manifests that are shipped: rendered as kubectl does, valid, and true to what the daemon is and takes."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.deploy.machine import ROOT

from fastcheck.cli.app import cli
from fastcheckd.config import Config
from fastcheckd.config_sources import load_config

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ["dev", "production"]
#: Kinds that are no part of Kubernetes itself.
CUSTOM = {"PodMonitor"}


@functools.cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, to render the overlays")
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning, of a field that will go away for example"
    return list(yaml.safe_load_all(done.stdout))


def one(overlay: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in rendered(overlay) if each["kind"] == kind]
    return found


def pod(overlay: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(overlay, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def daemon(overlay: str) -> dict[str, Any]:
    (found,) = pod(overlay)["containers"]
    return dict(found)


def config(overlay: str, tmp_path: Any) -> Config:
    """What the daemon would run with on one node."""
    (tmp_path / "node.yaml").write_text(one(overlay, "ConfigMap")["data"]["node.yaml"])
    environment = {
        each["name"]: each.get("value", "").replace("$(FASTCHECK_HOST)", "192.0.2.11")
        for each in daemon(overlay)["env"]
    }
    environment |= {"FASTCHECK_NODE_ID": "node-a", "FASTCHECK_HOST": "192.0.2.11"}
    return load_config(tmp_path / "node.yaml", environment=environment)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_what_its_schema_says_and_no_field_is_unknown(overlay):
    for each in rendered(overlay):
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, "1.30", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_daemon_takes_the_configuration(overlay, tmp_path):
    made = config(overlay, tmp_path)
    assert made.own_voter is not None and len(made.effective_voters) == (3 if overlay == "production" else 1)
    # What is no key of the daemon's would be ignored without a word.
    keys = {f"FASTCHECK_{field.name.upper()}" for field in dataclasses.fields(Config)} | {"FASTCHECK_ADDRESS"}
    assert {each["name"] for each in daemon(overlay)["env"]} <= keys
    ports = {port["name"]: port["containerPort"] for port in daemon(overlay)["ports"]}
    assert (ports["agent"], ports["data"], ports["lane"]) == (made.agent_port, made.data_port, made.lane_port)
    assert made.metrics_address == f"192.0.2.11:{ports['metrics']}"
    if overlay == "production":
        assert made.tls_cert_file and made.tls_key_file and made.tls_ca_file


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_node_holds_outlives_its_pod(overlay, tmp_path):
    made = config(overlay, tmp_path)
    volumes = {each["name"]: each for each in pod(overlay)["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in daemon(overlay)["volumeMounts"]}
    for folder in (made.ram_dir, made.state_dir):
        (mount,) = [path for path in mounts if folder.is_relative_to(path)]
        # The same path inside and outside: trainers map segments under the names that they are told.
        assert volumes[mounts[mount]]["hostPath"]["path"] == mount
    assert made.ram_dir.is_relative_to("/dev/shm")  # memory, on every node
    rolling = one(overlay, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 1, "maxSurge": 0}
    assert "memory" not in daemon(overlay)["resources"].get("limits", {})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_container_may_do_no_more_than_it_has_to(overlay):
    spec = pod(overlay)
    assert not spec.get("hostPID") and not spec.get("hostIPC")
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert not [each for each in rendered(overlay) if each["kind"] in {"Role", "ClusterRole", "RoleBinding"}]
    for container in [*spec["containers"], *spec["initContainers"]]:
        allowed = container["securityContext"]
        assert allowed["readOnlyRootFilesystem"] is True and allowed["allowPrivilegeEscalation"] is False
        assert allowed["capabilities"]["drop"] == ["ALL"]
        assert not allowed.get("privileged")
        _, _, tag = container["image"].rpartition(":")
        assert tag and tag != "latest"
    assert "add" not in daemon(overlay)["securityContext"]["capabilities"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_folders_are_given_away_before_anybody_writes_to_them(overlay):
    assert pod(overlay)["initContainers"][0]["name"] == "folders"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_what_each_of_them_is_for(overlay):
    container = daemon(overlay)
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600  # a terabyte to adopt


def test_in_production_a_stop_drains_with_a_command_that_there_is():
    command = daemon("production")["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    name, verb, _node, *options = command[2].split()
    assert name == "fastcheck"
    known = {option for parameter in cli.commands[verb].params for option in parameter.opts}
    assert {each for each in options if each.startswith("--")} <= known
    wait_s = int(options[options.index("--wait") + 1])
    assert pod("production")["terminationGracePeriodSeconds"] >= wait_s + 30
    assert pod("production")["priorityClassName"] == "system-node-critical"
