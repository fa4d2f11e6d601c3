"""A cluster whose trainers show tokens: one job near and far, nobody else's, and new keys while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from tests.tokens import ALICE, BOB, Issuer

from fastcheck import Checkpointer, DeniedError
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster
from fastcheck.security import VARIABLES
from fastcheck.tokens import FILE_VARIABLE

STATE = {"weights": torch.arange(1000.0)}


class World:
    """The cluster, and who issues tokens for it. Remembers each that was shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.issuer = Issuer(folder / "jwks.json")
        self.issuer.add("first")
        self.cluster = LocalCluster(folder / "cluster")
        self.shown: set[str] = set()

    def near(self, node_id: str) -> str:
        return self.cluster.address(node_id)

    def far(self, node_id: str) -> str:
        config = yaml.safe_load((self.cluster.dir / node_id / "config.yaml").read_text())
        return f"127.0.0.1:{config['agent_port']}"

    def show(self, monkeypatch: pytest.MonkeyPatch, token: str, name: str = "token") -> None:
        """From now on this process has that token, and the trainers' one certificate."""
        self.shown.add(token)
        path = self.folder / name
        path.with_suffix(".new").write_text(f"{token}\n")
        path.with_suffix(".new").replace(path)
        monkeypatch.setenv(FILE_VARIABLE, str(path))
        tls = self.cluster.dir / "tls"
        for variable, file in zip(
            VARIABLES, ("trainer-local.pem", "trainer-local.key", "ca.pem"), strict=True
        ):
            monkeypatch.setenv(variable, str(tls / file))

    def no_token_is_in_a_log(self) -> bool:
        logs = "".join(self.cluster.log_file(node).read_text() for node in self.cluster.node_ids)
        # What attackers leave out, or make of one letter, is in every log.
        parts = {part for token in self.shown for part in token.split(".") if len(part) > 16}
        assert logs and parts
        return not any(part in logs for part in parts)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("tokens"))
    keys = {key: str(value) for key, value in made.issuer.settings().items()}
    with made.cluster:
        made.cluster.up(3, tolerate=1, ram_budget="64MiB", settings={"keep_steps": 2, **keys}, tls=True)
        yield made


def test_trainers_with_and_without_a_daemon_share_a_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.show(monkeypatch, world.issuer.token(ALICE))

    def rank(number: int, address: str) -> Checkpointer:
        return Checkpointer(job="shared", rank=number, world_size=2, address=address)

    with rank(0, world.near("node-0")) as near, rank(1, world.far("node-1")) as far:
        for handle in [ckpt.save(1, STATE) for ckpt in (near, far)]:
            handle.result(timeout=60)
    # Each in the other's place.
    for number, address in enumerate((world.far("node-2"), world.near("node-2"))):
        into = {"weights": torch.zeros(1000)}
        with rank(number, address) as ckpt:
            assert ckpt.load(into) == 1
        assert torch.equal(into["weights"], STATE["weights"])
    with AdminClient(world.near("node-0")) as operator:  # who may enter runtime_dir
        owners = {job["job"]: job["owner"] for job in operator.jobs()["jobs"]}
    assert owners["shared"] == f"token/{ALICE}"


def test_a_job_is_its_subjects_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one's token, none, an old one and the certificate alone get nothing; the owner's next step commits."""
    world.show(monkeypatch, world.issuer.token(ALICE))
    own = Checkpointer(job="alices", rank=0, world_size=1, address=world.near("node-1"))
    with own:
        own.save(1, STATE).result(timeout=60)
        stolen = {"weights": torch.zeros(1000)}

        def refused(address: str, says: str) -> None:
            with Checkpointer(job="alices", rank=0, world_size=1, address=address) as thief:
                with pytest.raises(DeniedError, match=says):
                    thief.load(stolen)
                with pytest.raises(DeniedError, match=says):
                    thief.steps()
                with pytest.raises(DeniedError, match=says):
                    thief.save(2, STATE).result(timeout=60)

        expired = world.issuer.token(ALICE, exp=int(time.time()) - 60)
        other_audience = world.issuer.token(ALICE, aud="kubernetes")
        for token, says in (
            (world.issuer.token(BOB), f"belongs to token/{ALICE}, and this is token/{BOB}"),
            (expired, "expired"), (other_audience, "another audience"), (world.issuer.unsigned(), "signature"),
        ):  # fmt: skip
            world.show(monkeypatch, token, "thiefs")
            for address in (world.near("node-0"), world.far("node-2")):
                refused(address, says)
        monkeypatch.delenv(FILE_VARIABLE)
        refused(world.near("node-0"), "trainers show a token here")
        refused(world.far("node-2"), f"belongs to token/{ALICE}, and this is trainer/local")
        assert not stolen["weights"].any()

        world.show(monkeypatch, world.issuer.token(ALICE))
        own.save(2, STATE).result(timeout=60)
        assert own.steps() == [1, 2]
    assert world.no_token_is_in_a_log()


def test_keys_change_under_a_running_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old = world.issuer.token(ALICE, kid="first")
    world.show(monkeypatch, old)
    with Checkpointer(job="rotating", rank=0, world_size=1, address=world.near("node-0")) as ckpt:
        ckpt.save(1, STATE).result(timeout=60)
        world.issuer.add("second")
        ckpt.save(2, STATE).result(timeout=60)
        new = world.issuer.token(ALICE, kid="second")
        world.show(monkeypatch, new)  # into the same file
        world.issuer.retire("first")
        ckpt.save(3, STATE).result(timeout=60)
        # One that was stolen before is good for nothing more.
        world.show(monkeypatch, old, "stolen")
        with (
            Checkpointer(job="rotating", rank=0, world_size=1, address=world.far("node-1")) as thief,
            pytest.raises(DeniedError, match="none of those in token_jwks_file"),
        ):
            thief.steps()
        world.show(monkeypatch, new)
        assert ckpt.steps() == [2, 3]
    assert "the file of token keys has changed" in world.cluster.log_file("node-0").read_text()
    assert world.no_token_is_in_a_log()
