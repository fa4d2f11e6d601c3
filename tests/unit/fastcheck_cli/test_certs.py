"""`fastcheck certs`: what the daemon and the SDK take, private, and never overwritten."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastcheck import FastCheckError, InvalidArgumentError, certs
from fastcheck.cli.app import cli
from fastcheck.security import SERVER_NAME, VARIABLES, Certificate, open_channel
from fastcheckd.certificates import Certificates
from fastcheckd.config import Config
from fastcheckd.errors import ConfigError


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert run("certs", "init", "mine", "--dir", str(tmp_path / "ca"))[0] == 0
    return tmp_path / "ca"


def test_a_daemon_takes_what_was_made_for_it(folder: Path) -> None:
    code, out, _ = run(
        "certs", "node", "n1", "--host", "10.0.0.1", "--host", "n1.example", "--dir", str(folder)
    )
    assert code == 0
    keys = dict(line.split(": ", 1) for line in out.splitlines())
    files = {key: Path(path) for key, path in keys.items()}
    assert Certificates(Config(cluster_id="mine", node_id="n1", **files)).newest.seconds_left > 360 * 86400
    for other in (
        Config(cluster_id="mine", node_id="n2", **files),
        Config(cluster_id="x", node_id="n1", **files),
    ):
        with pytest.raises(ConfigError, match="must name this node"):
            Certificates(other)


def test_an_operators_certificate_is_no_nodes(folder: Path) -> None:
    code, out, _ = run("certs", "admin", "ann", "--dir", str(folder))
    assert code == 0
    exported = dict(line.removeprefix("export ").split("=", 1) for line in out.splitlines())
    assert list(exported) == list(VARIABLES)
    found = Certificate.from_environment(exported)
    assert found is not None and found.credentials() is not None
    with pytest.raises(ConfigError, match="must name this node"):
        Certificates(
            Config(
                cluster_id="mine",
                node_id="ann",
                tls_cert_file=found.cert,
                tls_key_file=found.key,
                tls_ca_file=found.ca,
            )
        )


def test_keys_are_private_and_nothing_is_overwritten(folder: Path) -> None:
    assert run("certs", "trainer", "t", "--dir", str(folder))[0] == 0
    for key in (folder / "ca.key", folder / "trainer-t.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for again in (("trainer", "t"), ("init", "mine")):
        code, _, err = run("certs", *again, "--dir", str(folder))
        assert code == 1 and "exists and is not overwritten" in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [("init", "Upper"), ("init", "a.b"), ("node", "../x"), ("node", "Up"), ("node", "n", "--host", "a b")],
)
def test_names_that_a_certificate_cannot_have_are_refused(
    folder: Path, tmp_path: Path, arguments: tuple[str]
) -> None:
    where = tmp_path / "new" if arguments[0] == "init" else folder
    assert run("certs", *arguments, "--dir", str(where))[0] in {1, 2}


def test_without_an_authority_or_the_package_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run("certs", "node", "n", "--dir", str(tmp_path))
    assert code == 1 and "fastcheck certs init" in err

    def missing() -> None:
        raise ModuleNotFoundError("no cryptography", name="cryptography")

    monkeypatch.setattr(certs, "_Library", missing)
    with pytest.raises(FastCheckError, match=r"fastcheck\[certs\]"):
        certs.LocalAuthority.create(tmp_path, "mine")


def test_a_certificate_is_whole_and_readable_or_the_mistake_is_named(tmp_path: Path) -> None:
    assert Certificate.from_environment({}) is None
    with pytest.raises(InvalidArgumentError, match="FASTCHECK_TLS_KEY, FASTCHECK_TLS_CA must be set too"):
        Certificate.from_environment({VARIABLES[0]: "/c"})
    nothing = dict.fromkeys(VARIABLES, str(tmp_path / "none")) | {SERVER_NAME: "n.c.fastcheck"}
    found = Certificate.from_environment(nothing)
    assert found is not None and found.server_name == "n.c.fastcheck"
    with pytest.raises(InvalidArgumentError, match="none: No such file"):
        found.credentials()
    (tmp_path / "none").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(InvalidArgumentError, match="more than"):
        found.credentials()


def test_a_unix_socket_needs_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[0], "/none")  # alone it would be a mistake
    open_channel("unix:/run/x.sock", []).close()
    with pytest.raises(InvalidArgumentError):
        open_channel("127.0.0.1:1", [])


def test_options_are_the_variables_for_one_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    code, _, err = run("status", "--address", "127.0.0.1:1", "--tls-cert", str(tmp_path / "mine.pem"))
    assert code == 1 and "FASTCHECK_TLS_KEY, FASTCHECK_TLS_CA must be set too" in err
    assert Certificate.from_environment() is None
