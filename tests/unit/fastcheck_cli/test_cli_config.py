"""`fastcheck config show`: the real `fastcheckd` is asked, and says why each value is what it is."""

import json

import pytest
from click.testing import CliRunner
from tests import schemas

from fastcheck.cli import offline_commands
from fastcheck.cli.app import cli


def show(*arguments, **environment):
    return CliRunner().invoke(
        cli, ["config", "show", *arguments], env={"NO_COLOR": "1", "COLUMNS": "160", **environment}
    )


def test_values_and_where_they_come_from(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text("tolerate: 2\nspread: 4\n")
    arguments = ["--config", str(file), "--set", "labels=rack=a1"]
    done = show(*arguments, "-o", "json", FASTCHECK_SPREAD="5")
    assert (done.exit_code, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    schemas.check("config-show", result)
    found = {entry.pop("key"): entry for entry in result["keys"]}
    assert found["tolerate"] == {"value": 2, "origin": "file", "where": str(file)}
    assert found["spread"] == {"value": 5, "origin": "variable", "where": "FASTCHECK_SPREAD"}
    assert found["labels"] == {"value": {"rack": "a1"}, "origin": "flag", "where": "--set labels"}
    assert found["keep_steps"] == {"value": 1, "origin": "default", "where": ""}

    table = show(*arguments, "--origin", FASTCHECK_SPREAD="5").stdout
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}
    assert rows["spread"] == ["5", "variable", "FASTCHECK_SPREAD"]
    assert rows["keep_steps"] == ["1", "default"]
    assert rows["tolerate"][:2] == ["2", "file"]
    assert "variable" not in show(*arguments, FASTCHECK_SPREAD="5").stdout, "only when asked for"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--set", "tolerrate=1"], "tolerrate"), (["--config", "/nowhere/node.yaml"], "/nowhere/node.yaml")],
)
def test_a_configuration_that_cannot_work_is_one_line_and_exit_1(arguments, named):
    done = show(*arguments, "-o", "json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("fastcheck: ") and named in done.stderr and done.stderr.count("\n") == 1


def test_without_the_daemon_it_says_what_to_install(monkeypatch):
    def is_missing(keys):
        raise ModuleNotFoundError("package fastcheckd is not installed", name="fastcheckd")

    monkeypatch.setattr(offline_commands, "daemon_environment", is_missing)
    done = show()
    assert done.exit_code == 1 and "pip install 'fastcheck[daemon]'" in done.stderr
