"""Every `-o json` output is as docs/schemas says, over a real AdminService; in tests/cluster from real daemons."""

import copy
import json

import click
import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator, ValidationError
from tests import schemas

from fastcheck.cli.app import cli
from fastcheck.cli.manual import walk


def asked(*arguments):
    done = CliRunner().invoke(cli, [*arguments, "-o", "json"], env={"NO_COLOR": "1"})
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def with_json():
    """Names of the commands that take `-o`."""
    return [
        names
        for command, names in walk(cli)
        if any("--output" in parameter.opts for parameter in command.params)
    ]


def test_every_command_with_json_has_a_schema_and_every_schema_a_command():
    wanted = {schemas.of_command(*names) for names in with_json()}
    assert {path.stem for path in schemas.FOLDER.glob("*.json")} == wanted | {"common"}


@pytest.mark.parametrize("path", sorted(schemas.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_each_is_a_schema_that_says_its_version_and_requires_what_it_promises(path):
    schema = json.loads(path.read_text())
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == path.name
    if path.stem != "common":
        assert schema["properties"]["schema_version"] == {"const": 1}
        optional = set(schema["properties"]) - set(schema["required"])
        assert optional <= {"verdict", "killed_pids"}


def test_a_key_that_is_missing_wrong_or_not_in_the_schema_is_noticed(address):
    good = asked("nodes", "--address", address)
    schemas.check("nodes", good)
    for change in (
        lambda node: node.pop("reason"),
        lambda node: node.update(state="LOST"),
        lambda node: node.update(news=1),
        lambda node: node["lane"].pop("tls") if node["lane"] else node.update(lane=3),
    ):
        bad = copy.deepcopy(good)
        change(bad["nodes"][0])
        with pytest.raises(ValidationError):
            schemas.check("nodes", bad)
    # A later version's key is none of an older schema's business.
    good["nodes"][0]["news"] = 1
    schemas.validator("nodes").validate(good)


def test_every_command_that_is_promised_is_there_with_its_options():
    promised = {
        "status", "nodes", "jobs", "checkpoints", "replicas", "inspect", "verify", "drain", "safe-to-stop", "delete",
        "top", "demo", "local up", "local down", "local status", "local kill", "local start",
    }  # fmt: skip
    commands = {" ".join(names): command for command, names in walk(cli)}
    assert promised <= set(commands)
    for name in promised:
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert "-o" in options, name
        if name != "demo":
            assert "--timeout" in options, name
        if not name.startswith(("local", "demo")):
            assert "--address" in options, name
    assert all(isinstance(command, click.Command) and command.help for command in commands.values())
