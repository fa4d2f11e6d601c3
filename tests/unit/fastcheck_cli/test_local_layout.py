"""What a local cluster decides: paths, ports, voters, and configs that the daemon accepts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fastcheck.local import layout
from fastcheck.local.layout import NodePorts
from fastcheck.local.ports import candidate_ports, ephemeral_range, find_free_ports
from fastcheckd.config_sources import load_config


def config_of(cluster_dir, count=4, **changes):
    names = [layout.node_id(i) for i in range(count)]
    ports = {
        name: NodePorts(agent=p, data=p + 1, lane=p + 2, metrics=p + 5, registry=p + 3, raft=p + 4)
        for name, p in zip(names, range(20_000, 30_000, 10), strict=False)
    }
    voters = {name: ports[name] for name in names[: layout.voter_count(count)]}
    arguments = {
        "cluster_id": "local-1",
        "tolerate": 1,
        "ram_dir": cluster_dir / "ram" / names[-1],
        "ram_budget": "512MiB",
        "settings": {},
    } | changes
    return layout.node_config(cluster_dir, names[-1], ports[names[-1]], voters, **arguments)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 20])
def test_the_daemon_accepts_the_config_of_every_cluster_size(tmp_path, count):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config_of(tmp_path, count)))
    config = load_config(file)
    assert config.node_id == f"node-{count - 1}"
    assert config.ram_budget_bytes == 512 << 20
    assert len(config.voters) == layout.voter_count(count)
    assert config.own_voter is None or count <= layout.voter_count(count)
    assert len(str(config.agent_socket)) < 100


def test_settings_reach_the_config_and_win(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config_of(tmp_path, settings={"keep_steps": 5, "spread": 4})))
    config = load_config(file)
    assert (config.keep_steps, config.spread) == (5, 4)


@given(depth=st.integers(0, 40))
def test_socket_paths_stay_short_however_deep_the_folder_is(depth):
    cluster_dir = Path("/srv", *["a-rather-long-name"] * depth)
    path = layout.runtime_dir(cluster_dir, "node-12") / "fastcheckd.sock"
    assert len(os.fsencode(path)) < 100
    if len(os.fsencode(cluster_dir)) < 60:
        assert path.is_relative_to(cluster_dir), "a person finds it beside the rest"


def test_a_deep_temporary_folder_does_not_lengthen_socket_paths(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 90)
    deep = Path("/tmp/" + "y" * 90)
    assert len(str(layout.runtime_dir(deep, "node-0") / "fastcheckd.sock")) < 100


def test_two_clusters_share_no_folder_outside_their_own(tmp_path):
    shm = Path("/dev/shm")
    roots = {layout.ram_root(tmp_path / name, shm, 10, 5) for name in ("one", "two")}
    assert len(roots) == 2
    assert all(root.parent == shm for root in roots)


def test_ram_goes_below_the_folder_when_shared_memory_is_too_small(tmp_path):
    assert layout.ram_root(tmp_path, Path("/dev/shm"), 4, 5) == tmp_path / "ram"


@pytest.mark.parametrize(
    ("name", "good"), [("node-0", True), ("node-77", True), ("node-", False), ("../x", False), ("n", False)]
)
def test_node_ids(name, good):
    assert layout.is_node_id(name) == good


def test_free_ports_are_distinct_and_outside_the_ephemeral_range():
    found = find_free_ports(20)
    low, high = ephemeral_range()
    assert len(set(found)) == 20
    assert all(not low <= port <= high for port in found)


def test_taken_and_avoided_ports_are_not_handed_out(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        busy = taken.getsockname()[1]
        free = find_free_ports(2)
        monkeypatch.setattr("fastcheck.local.ports.candidate_ports", lambda _: [busy, *free])
        assert find_free_ports(1, avoid=frozenset(free[:1])) == [free[1]]
        with pytest.raises(OSError, match="only 2 of 3 ports"):
            find_free_ports(3)


def test_who_asks_next_is_not_given_what_was_just_handed_out(monkeypatch, tmp_path):
    """Nobody is bound yet to what was: its daemons are still importing."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ask = "from fastcheck.local.ports import find_free_ports; print(*find_free_ports(50))"
    askers = [
        subprocess.Popen(
            [sys.executable, "-c", ask], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
        )
        for _ in range(4)
    ]
    handed_out = [int(port) for asker in askers for port in asker.communicate(timeout=60)[0].split()]
    handed_out += find_free_ports(50)
    assert len(handed_out) == len(set(handed_out)) == 250


def leave_rubbish(path):
    path.write_text("rubbish")


def leave_a_link(path):
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("leave", [leave_rubbish, os.mkfifo, os.mkdir, leave_a_link])
def test_ports_are_found_whatever_lies_where_turns_are_kept(monkeypatch, tmp_path, leave):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    leave(tmp_path / f"fastcheck-ports-{os.getuid()}")
    assert len(set(find_free_ports(20))) == 20


def test_a_huge_ephemeral_range_still_leaves_candidates():
    assert len(candidate_ports((1024, 65_535))) > 10_000
