"""What decided each key of a configuration, and that no secret is shown."""

import dataclasses
import json

import pytest

from fastcheckd.config import Config
from fastcheckd.config_sources import (
    DEFAULT,
    HIDDEN,
    Origin,
    is_secret,
    load_config,
    load_with_origins,
    report,
)
from fastcheckd.main import main


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "node.yaml"
    path.write_text("tolerate: 2\nspread: 5\nkeep_steps: 4\n")
    return path


def test_the_strongest_source_is_named(file):
    environment = {"FASTCHECK_SPREAD": "6", "FASTCHECK_KEEP_STEPS": "5", "FASTCHECK_ADDRESS": "unix:///x"}
    config, origins = load_with_origins(file, environment=environment, overrides=["keep_steps=6"])
    assert config == load_config(file, environment=environment, overrides=["keep_steps=6"])
    assert set(origins) == {field.name for field in dataclasses.fields(Config)}
    assert {key: origin for key, origin in origins.items() if origin != DEFAULT} == {
        "tolerate": Origin("file", str(file)),
        "spread": Origin("variable", "FASTCHECK_SPREAD"),
        "keep_steps": Origin("flag", "--set keep_steps"),
    }


def test_a_value_that_is_the_default_is_from_where_it_was_said():
    _, origins = load_with_origins(None, overrides=[f"tolerate={Config().tolerate}"])
    assert origins["tolerate"].kind == "flag"


def test_every_key_is_reported_once_in_order_and_as_json():
    config, origins = load_with_origins(None, overrides=["labels=rack=a1", "ram_budget_bytes=3MiB"])
    keys = json.loads(json.dumps(report(config, origins)))["keys"]
    assert [entry["key"] for entry in keys] == [field.name for field in dataclasses.fields(Config)]
    values = {entry["key"]: entry["value"] for entry in keys}
    assert (values["labels"], values["ram_budget_bytes"], values["voters"]) == ({"rack": "a1"}, 3 << 20, [])


def test_what_is_called_like_a_secret_is_hidden_and_the_name_of_its_file_is_not():
    hidden = ["raft_key", "key", "token", "admin_token", "client_secret", "password"]
    assert all(map(is_secret, hidden))
    assert not any(map(is_secret, ["raft_key_file", "tls_key_file", "keep_steps", "monkey", "tokens_max"]))


def test_a_hidden_value_is_not_printed(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(Config):
        admin_token: str = ""

    origins = dict.fromkeys([field.name for field in dataclasses.fields(Later)], DEFAULT)
    shown = report(Later(admin_token="s3cret"), origins)
    assert "s3cret" not in json.dumps(shown)
    assert shown["keys"][-1] == {"key": "admin_token", "value": HIDDEN, "origin": "default", "where": ""}
    assert report(Later(), origins)["keys"][-1]["value"] == "", "that there is none may be seen"


def test_the_program_prints_it_also_where_the_daemon_would_refuse_to_serve(capsys, monkeypatch, file):
    monkeypatch.delenv("FASTCHECK_HOST", raising=False)
    # Off loopback without certificates: `run` refuses, and one wants to see why.
    assert main(["config", "--config", str(file), "--set", "host=10.0.0.1", "--set", "raft_key_file=/k"]) == 0
    host = next(e for e in json.loads(capsys.readouterr().out)["keys"] if e["key"] == "host")
    assert host == {"key": "host", "value": "10.0.0.1", "origin": "flag", "where": "--set host"}
    assert main(["config", "--set", "tolerrate=1"]) == 78
