import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.config import Config, check_exposure, is_loopback, split_address
from fastcheckd.config_sources import load_config, parse_size
from fastcheckd.errors import ConfigError
from fastcheckd.main import main

VOTERS = """
voters:
  - {node_id: a, registry_address: "127.0.0.1:9001", raft_address: "127.0.0.1:9002"}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fastcheckd.yaml"
    path.write_text(text)
    return path


def test_defaults_work_on_one_machine():
    config = Config()
    assert config.own_voter is not None
    assert config.agent_socket.name == "fastcheckd.sock"


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    path = write(tmp_path, "tolerate: 2\nspread: 5\nkeep_steps: 4\n")
    config = load_config(
        path, environment={"FASTCHECK_SPREAD": "6", "FASTCHECK_KEEP_STEPS": "5"}, overrides=["keep_steps=6"]
    )
    assert (config.tolerate, config.spread, config.keep_steps) == (2, 6, 6)
    assert config.max_in_flight == Config().max_in_flight


def test_environment_of_the_sdk_is_not_taken_for_configuration():
    load_config(
        environment={"FASTCHECK_ADDRESS": "unix:///x", "FASTCHECK_JOB": "gpt", "FASTCHECK_DISABLE": "1"}
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tolerrate: 1", "tolerrate"),
        ("tolerate: 0", "tolerate"),
        ("tolerate: yes", "tolerate"),
        ("tolerate: '1'", "tolerate"),
        ("spread: 1\ntolerate: 2", "spread"),
        ("agent_port: 70000", "agent_port"),
        ("agent_port: 7451", "port"),
        ("node_id: ../x", "node_id"),
        ("cluster_id: ''", "cluster_id"),
        ("ram_budget_bytes: lots", "ram_budget_bytes"),
        ("ram_budget_bytes: 5", "ram_budget_bytes"),
        ("job_budget_bytes: 5", "job_budget_bytes"),
        ("chunk_bytes: 5000", "chunk_bytes"),
        ("heartbeat_interval_s: -1", "heartbeat_interval_s"),
        ("heartbeat_interval_s: .nan", "heartbeat_interval_s"),
        ("suspect_after_s: 0.1", "suspect_after_s"),
        ("token_audience: fastcheck", "token_jwks_file"),
        ("token_jwks_file: jwks.json\ntoken_issuer: i\ntoken_audience: a", "needs tls_cert_file"),
        ("tls_cert_file: c\ntls_key_file: k\ntls_ca_file: a\nnode_id: n\ntoken_jwks_file: j", "token_issuer"),
        ("token_issuer: 'a b'", "token"),
        ("log_format: xml", "log_format"),
        ("codec: sometimes", "codec"),
        ("codec: on", "codec"),
        ("codec_threads: 0", "codec_threads"),
        ("codec_nice: 20", "codec_nice"),
        ("voters: [a, b]", "voters"),
        ("voters: 3", "voters"),
        ("- 1", "key: value"),
        ("a: [", "YAML"),
    ],
)
def test_a_bad_file_is_refused_by_the_name_of_its_key(tmp_path, text, named):
    with pytest.raises(ConfigError, match=named):
        load_config(write(tmp_path, text))


def test_text_that_is_no_yaml_names_the_variable_or_the_flag():
    with pytest.raises(ConfigError, match="FASTCHECK_NODE_ID=':' is not valid YAML"):
        load_config(None, environment={"FASTCHECK_NODE_ID": ":"})
    with pytest.raises(ConfigError, match="--set pacing='{' is not valid YAML"):
        load_config(None, overrides=["pacing={"])


def test_off_is_a_word_where_a_word_is_wanted(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text("pacing: off\n")
    assert load_config(file).pacing == "off"
    file.write_text("node_id: yes\n")
    with pytest.raises(ConfigError, match=r"node_id.*in quotes"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_an_override_without_value_is_refused():
    with pytest.raises(ConfigError, match="key=value"):
        load_config(overrides=["tolerate"])


def test_voters_that_others_can_reach_need_a_key_or_certificates(tmp_path):
    far = VOTERS.replace("127.0.0.1", "10.0.0.1")
    three = VOTERS + "".join(
        f'  - {{node_id: {n}, registry_address: "127.0.0.1:90{i}1", raft_address: "127.0.0.1:90{i}2"}}\n'
        for i, n in ((1, "b"), (2, "c"))
    )
    for text in (far, three):
        assert load_config(write(tmp_path, text + "node_id: other")), "who is no voter needs no secret"
        text += "node_id: a\n"  # noqa: PLW2901
        with pytest.raises(ConfigError, match=r"tls_cert_file.*raft_key_file"):
            load_config(write(tmp_path, text))
        load_config(write(tmp_path, text + "raft_key_file: /etc/raft.key"))
        tls = "tls_cert_file: /c\ntls_key_file: /k\n"
        with pytest.raises(ConfigError, match="needs tls_key_file and tls_ca_file"):
            load_config(write(tmp_path, text + tls))
        load_config(write(tmp_path, text + tls + "tls_ca_file: /ca"))


def test_an_even_number_of_voters_is_refused(tmp_path):
    second = VOTERS + '  - {node_id: b, registry_address: "127.0.0.1:9003", raft_address: "127.0.0.1:9004"}\n'
    with pytest.raises(ConfigError, match="1, 3, 5 or 7"):
        load_config(write(tmp_path, second))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("500 MB", 500_000_000),
        ("1.5K", 1500),
        ("12", 12),
        ("7 b", 7),
        (42, 42),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@given(st.text(max_size=12))
def test_a_size_is_understood_or_refused(text):
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_bad_addresses(address):
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    assert is_loopback("127.3.4.5") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")


TLS = {"tls_cert_file": Path("/c"), "tls_key_file": Path("/k"), "tls_ca_file": Path("/a")}


@pytest.mark.parametrize(
    ("values", "exposed"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "10.0.0.1"}, True),
        ({"host": "node-1.example"}, True),
        ({"host": "0.0.0.0"}, True),
        ({"lane_host": "10.0.0.1"}, True),
    ],
)
def test_other_machines_are_served_with_certificates_or_on_purpose(values, exposed):
    config = Config(node_id="a", raft_key_file=Path("/key"), **values)
    assert bool(config.exposed) is exposed
    with contextlib.nullcontext() if not exposed else pytest.raises(ConfigError, match="insecure: true"):
        check_exposure(config)
    check_exposure(dataclasses.replace(config, insecure=True))
    check_exposure(dataclasses.replace(config, **TLS))


def test_with_certificates_names_must_be_such_that_a_certificate_can_have_them():
    for values in (
        {"node_id": "Node"},
        {"cluster_id": "C"},
        {"cluster_id": "a.b"},
        {"node_id": "n" * 128, "cluster_id": "c" * 113},
    ):
        Config(**{"node_id": "a", **values})
        with pytest.raises(ConfigError, match="cert"):
            Config(**{"node_id": "a", **values}, **TLS)


def test_a_daemon_that_would_be_open_to_all_does_not_start(capsys):
    assert main(["validate", "--set", "host=10.0.0.1", "--set", "raft_key_file=/k"]) == 78
    assert "10.0.0.1:7450" in capsys.readouterr().err
    assert (
        main(["validate", "--set", "host=10.0.0.1", "--set", "raft_key_file=/k", "--set", "insecure=true"])
        == 0
    )
