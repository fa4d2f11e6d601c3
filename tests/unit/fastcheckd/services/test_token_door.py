"""The door of a real gRPC server, near and far: who a call's token says it is from, and who must show one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.certificates import Authority
from tests.tokens import ALICE, BOB, Issuer

from fastcheck_proto.conventions import TOKEN_BYTES_MAX
from fastcheck_proto.v1 import admin_pb2, admin_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from fastcheckd.config import Config
from fastcheckd.dialer import Dialer
from fastcheckd.errors import DeniedError
from fastcheckd.services.admission import CALLER, Admission, bearer
from fastcheckd.tokens import Tokens


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("ca"))
    authority.node("c", "n")
    for role in ("trainer", "admin", "token"):
        authority.issue(f"{role}-x", f"spiffe://c/fastcheck/{role}/x")
    return authority


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    issuer = Issuer(tmp_path_factory.mktemp("issuer") / "jwks.json")
    issuer.add("k")
    return issuer


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers each kind of call with whom it takes the caller for."""

    async def ListSteps(self, request: Any, context: Any) -> Any:
        return trainer_pb2.ListStepsResponse(steps=list(str(CALLER.get()).encode()))

    async def Load(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield trainer_pb2.LoadResponse(segment=trainer_pb2.LoadSegment(segment={"path": str(CALLER.get())}))

    async def Upload(self, request_iterator: Any, context: Any) -> Any:
        return trainer_pb2.UploadResponse(bytes=len(str(CALLER.get())))

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        yield trainer_pb2.DaemonMessage(segment={"segment_id": str(CALLER.get())})


class Admin(admin_pb2_grpc.AdminServiceServicer):
    async def Status(self, request: Any, context: Any) -> Any:
        return admin_pb2.StatusResponse(leader=str(CALLER.get()))


class Door:
    """The addresses of the server, and calls to it."""

    def __init__(self, authority: Authority, near: str, far: str) -> None:
        self.authority, self.near, self.far = authority, near, far

    def channel(self, certificate: str = "") -> grpc.aio.Channel:
        if not certificate:
            return grpc.aio.insecure_channel(self.near)
        folder = self.authority.folder
        ca, key, cert = self.authority.ca_file, folder / f"{certificate}.key", folder / f"{certificate}.pem"
        credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in (ca, key, cert)))
        named = [("grpc.ssl_target_name_override", "n.c.fastcheck")]
        return grpc.aio.secure_channel(self.far, credentials, named)

    async def asked(self, *shown: str, certificate: str = "", method: str = "ListSteps") -> str:
        """Whom the service took the caller for, or why it was refused."""
        metadata = tuple(("authorization", each) for each in shown)
        async with self.channel(certificate) as channel:
            trainer, admin = (
                trainer_pb2_grpc.TrainerServiceStub(channel),
                admin_pb2_grpc.AdminServiceStub(channel),
            )
            try:
                if method == "Status":
                    return (
                        await admin.Status(admin_pb2.StatusRequest(), timeout=10, metadata=metadata)
                    ).leader
                if method == "Load":
                    stream = trainer.Load(trainer_pb2.LoadRequest(), timeout=10, metadata=metadata)
                    return (await stream.read()).segment.segment.path
                if method == "Upload":
                    response = await trainer.Upload(iter(()), timeout=10, metadata=metadata)
                    return f"{response.bytes} characters"
                if method == "Session":
                    stream = trainer.Session(iter(()), timeout=10, metadata=metadata)
                    return (await stream.read()).segment.segment_id
                answer = await trainer.ListSteps(
                    trainer_pb2.ListStepsRequest(), timeout=10, metadata=metadata
                )
                return bytes(answer.steps).decode()
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"


def through(authority: Authority, issuer: Issuer | None, folder: Path, story: Callable[[Door], Any]) -> None:
    async def run() -> None:
        config = Config(
            cluster_id="c",
            node_id="n",
            **dict(
                zip(
                    ("tls_cert_file", "tls_key_file"),
                    (authority.folder / f"n.{k}" for k in ("pem", "key")),
                    strict=True,
                )
            ),
            tls_ca_file=authority.ca_file,
            **(issuer.settings() if issuer else {}),
        )
        server = grpc.aio.server(interceptors=[Admission("c", tokens=Tokens(config) if issuer else None)])
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
        near = f"unix:{folder / 'd.sock'}"
        server.add_insecure_port(near)
        port = Dialer.of(config).listen(server, "127.0.0.1:0")
        await server.start()
        try:
            await story(Door(authority, near, f"127.0.0.1:{port}"))
        finally:
            await server.stop(0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_token_says_who_calls_near_and_far(authority: Authority, issuer: Issuer, tmp_path: Path) -> None:
    shown = f"Bearer {issuer.token()}"

    async def story(door: Door) -> None:
        for certificate in ("", "trainer-x"):
            assert await door.asked(shown, certificate=certificate) == f"token/{ALICE}"
            assert await door.asked(shown, certificate=certificate, method="Load") == f"token/{ALICE}"
            assert await door.asked(shown, certificate=certificate, method="Session") == f"token/{ALICE}"
            sent = await door.asked(shown, certificate=certificate, method="Upload")
            assert sent == f"{len('token/' + ALICE)} characters"
        assert await door.asked(f"bearer {issuer.token(BOB)}") == f"token/{BOB}"

    through(authority, issuer, tmp_path, story)


def test_near_trainers_need_a_token_and_operators_do_not(
    authority: Authority, issuer: Issuer, tmp_path: Path
) -> None:
    async def story(door: Door) -> None:
        for method in ("ListSteps", "Load", "Upload", "Session"):
            refused = await door.asked(method=method)
            assert refused.startswith("PERMISSION_DENIED: trainers show a token here")
            assert "FASTCHECK_TOKEN_FILE" in refused
        # By the socket alone, or by certificate: operators have no tokens, and nobody becomes one by a token.
        assert await door.asked(method="Status") == "local"
        assert await door.asked(f"Bearer {issuer.token()}", method="Status") == "local"
        assert await door.asked(certificate="admin-x", method="Status") == "admin/x"
        assert await door.asked(certificate="admin-x") == "admin/x"
        assert await door.asked(f"Bearer {issuer.token()}", certificate="admin-x") == "admin/x"
        # As before there were tokens.
        assert await door.asked(certificate="trainer-x") == "trainer/x"
        # A certificate is no token, whatever it says.
        assert "names nobody" in await door.asked(certificate="token-x")
        assert "may not call" in await door.asked(
            f"Bearer {issuer.token()}", certificate="trainer-x", method="Status"
        )

    through(authority, issuer, tmp_path, story)


def test_a_bad_token_is_never_taken_for_none(authority: Authority, issuer: Issuer, tmp_path: Path) -> None:
    """Not even from who would be let in without one."""
    good = issuer.token()

    async def story(door: Door) -> None:
        for shown in (
            ["Bearer x"], ["Bearer "], ["Bearer"], [good], [f"Basic {good}"], [""], [f"Bearer {good}"] * 2,
            [f"Bearer  {good}"], [f"Bearer {issuer.token(exp=1)}"],
            [f"Bearer {issuer.by_public_key()}"], [f"Bearer {issuer.unsigned()}"],
            [f"Bearer {issuer.token(more='x' * TOKEN_BYTES_MAX)}"],
        ):  # fmt: skip
            for certificate in ("", "trainer-x"):
                refused = await door.asked(*shown, certificate=certificate)
                assert refused.startswith("PERMISSION_DENIED"), (shown[0][:20], refused)
                assert good not in refused
        # Before any of ours has seen it.
        assert (await door.asked("Bearer " + "x" * 100_000)).startswith("RESOURCE_EXHAUSTED")
        assert await door.asked(f"Bearer {good}") == f"token/{ALICE}"

    through(authority, issuer, tmp_path, story)


def test_where_there_are_no_tokens_one_that_is_shown_counts_for_nothing(
    authority: Authority, issuer: Issuer, tmp_path: Path
) -> None:
    async def story(door: Door) -> None:
        assert await door.asked(f"Bearer {issuer.token()}") == "local"
        assert await door.asked() == "local"
        assert await door.asked(f"Bearer {issuer.token()}", certificate="trainer-x") == "trainer/x"

    through(authority, None, tmp_path, story)


def test_what_is_shown_is_one_bearer_token() -> None:
    assert bearer(None) is None
    assert bearer([("x", "Bearer t"), ("authorization-info", "t")]) is None
    assert bearer([("authorization", "Bearer t")]) == "t"
    with pytest.raises(DeniedError, match="one token"):
        bearer([("authorization", b"Bearer t")])
