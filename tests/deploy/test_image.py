"""The image's Dockerfile: nothing is wrong with it, it finds what it copies, and what it installs is known by hash."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests.deploy.machine import ROOT

from fastcheckd.config import Config

DOCKER = ROOT / "deploy/docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()


def locked(name: str) -> dict[str, str]:
    """Package → version, each with at least one hash."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (DOCKER / name).read_text()):
        if match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", entry):
            assert "--hash=sha256:" in entry, entry
            found[match[1].lower().replace("_", "-")] = match[2]
    return found


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", each)[0].lower().replace("_", "-") for each in requirements}


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")  # of the dev extra
    done = subprocess.run(
        [str(hadolint), str(DOCKER / "Dockerfile")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_all_that_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert ignored[0] == "*"
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, pattern) for pattern in allowed), source


def test_the_lock_is_of_these_dependencies_and_of_versions_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = names(
        [*project["dependencies"], *extras["daemon"], *extras["cli"], *extras["certs"], *extras["tokens"]]
    )
    lock = locked("requirements.txt")
    assert wanted <= set(lock), "run: make locks"
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert {name: version for name, version in lock.items() if name in pins} == {
        name: pins[name] for name in lock if name in pins
    }, "run: make locks"
    assert "torch" not in lock
    assert "hatchling" in locked("build-requirements.txt")


def test_it_is_not_root_and_its_health_is_asked_where_it_is_told() -> None:
    assert re.search(r"^USER 1000:1000$", DOCKERFILE, re.M)
    assert f"http://{Config(node_id='a').metrics_address}/livez" in DOCKERFILE
    tags = re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)
    assert tags and all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", tag) for tag in tags)


@pytest.mark.parametrize("option", ["--require-hashes", "--no-cache-dir"])
def test_each_download_is_checked_and_none_is_kept(option: str) -> None:
    installs = re.findall(r"pip install ([^&\n]+)", DOCKERFILE)
    downloads = [each for each in installs if "--no-index" not in each]
    assert downloads and all(option in each for each in downloads)
