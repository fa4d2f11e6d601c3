"""Whose a token is: those that pass, and all that must not."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tokens as made
from tests.tokens import ALICE, AUDIENCE, BOB, Issuer

from fastcheck_proto.conventions import TOKEN_BYTES_MAX
from fastcheckd.config import Config
from fastcheckd.errors import ConfigError, DeniedError
from fastcheckd.registry.model import IDENTITY_BYTES_MAX
from fastcheckd.tokens import KEYS_MAX, SUBJECT_BYTES_MAX, Tokens


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    issuer = Issuer(tmp_path_factory.mktemp("issuer") / "jwks.json")
    for algorithm in ("ES256", "RS256", "EdDSA"):
        issuer.add(algorithm.lower(), algorithm)
    return issuer


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    """Whose keys have the same names."""
    stranger = Issuer(tmp_path_factory.mktemp("stranger") / "jwks.json")
    stranger.add("es256")
    return stranger


def reader(issuer: Issuer) -> Tokens:
    tls = dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_ca_file"), Path("not read here"))
    return Tokens(Config(cluster_id="c", node_id="n", **tls, **issuer.settings()))


@pytest.fixture(scope="module")
def tokens(issuer: Issuer) -> Tokens:
    return reader(issuer)


@pytest.mark.parametrize("kid", ["es256", "rs256", "eddsa"])
def test_a_token_names_its_subject(issuer: Issuer, kid: str) -> None:
    tokens = reader(issuer)
    assert tokens.subject(issuer.token(kid=kid)) == ALICE
    assert tokens.subject(issuer.token(BOB, kid=kid, aud=AUDIENCE)) == BOB
    assert tokens.subject(issuer.token("spiffe://c/ns/a", kid=kid, aud=["x", AUDIENCE])) == "spiffe://c/ns/a"


def test_clocks_may_differ_a_little(issuer: Issuer) -> None:
    tokens, now = reader(issuer), int(time.time())
    assert tokens.subject(issuer.token(exp=now - 5)) == ALICE
    assert tokens.subject(issuer.token(iat=now + 20, nbf=now + 20)) == ALICE


#: What is wrong → a token of that kind, and what the refusal says of it.
BAD: dict[str, tuple[Callable[[Issuer, Issuer], str], str]] = {
    "expired": (lambda own, _: own.token(exp=int(time.time()) - 60), "expired"),
    "of tomorrow": (lambda own, _: own.token(nbf=int(time.time()) + 3600), "not valid yet"),
    "issued tomorrow": (lambda own, _: own.token(iat=int(time.time()) + 3600), "not valid yet"),
    "for another audience": (lambda own, _: own.token(aud=["kubernetes"]), "another audience"),
    "for an audience that begins alike": (lambda own, _: own.token(aud="fastcheck-2"), "another audience"),
    "of another issuer by name": (lambda own, _: own.token(iss="https://other.example"), "another issuer"),
    "of an issuer that begins alike": (lambda own, _: own.token(iss=f"{made.NAME}.evil"), "another issuer"),
    "of another key with the same id": (lambda _, other: other.token(), "signature does not pass"),
    "signed by nobody": (lambda own, _: own.unsigned(), "signature does not pass"),
    "signed by nobody, in capitals": (lambda own, _: own.unsigned(alg="NONE"), "signature does not pass"),
    "signed with the public key": (lambda own, _: own.by_public_key(), "signature does not pass"),
    "of an algorithm that its key is not for": (lambda own, _: own.unsigned(alg="RS256"), "signature does not pass"),
    "with another's claims": (lambda own, _: spliced(own.token(), own.token(BOB)), "signature does not pass"),
    "of a key that nobody has": (lambda own, _: own.unsigned(kid="x"), "none of those"),
    "without a key's name": (lambda own, _: own.unsigned(kid=None), "malformed|none of those"),
    "with a key of its own": (lambda own, other: own_key(other), "none of those"),
    "that demands what nobody knows": (lambda own, _: own.token(headers={"crit": ["x"], "x": 1}), "crit|malformed"),
    "that never ends": (lambda own, _: own.token(exp=None), "its exp"),
    "for nobody": (lambda own, _: own.token(aud=None), "its aud"),
    "of no issuer": (lambda own, _: own.token(iss=None), "its iss"),
    "of nobody": (lambda own, _: own.token("", sub=None), "its sub"),
    "of an empty subject": (lambda own, _: own.token(""), "subject"),
    "of a subject with a blank": (lambda own, _: own.token("a b"), "subject"),
    "of a subject with a line's end": (lambda own, _: own.token("alice\n"), "subject"),
    "of a subject out of ASCII": (lambda own, _: own.token("älice"), "subject"),
    "of too long a subject": (lambda own, _: own.token("a" * (SUBJECT_BYTES_MAX + 1)), "subject"),
    "of a subject that is no text": (lambda own, _: own.signed(claims_with("sub", [ALICE])), "malformed"),
    "with an end that is none": (lambda own, _: own.signed(claims_with("exp", "soon")), "malformed"),
    "with an end that is endless": (lambda own, _: own.signed(claims_with("exp", float("inf"))), "malformed"),
    "too large": (lambda own, _: own.token(more="x" * TOKEN_BYTES_MAX), "malformed"),
    "with a deep header": (lambda own, _: deep(), "malformed"),
    "with deep claims": (lambda own, _: own.signed(b"[" * 2000), "malformed"),
    "of two parts": (lambda own, _: own.token().rpartition(".")[0], "malformed"),
    "with padding": (lambda own, _: own.token() + "=", "malformed"),
    "empty": (lambda own, _: "", "malformed"),
    "of other characters": (lambda own, _: "a.b.ü", "malformed"),
}  # fmt: skip


def spliced(signed: str, claims: str) -> str:
    head, _, signature = signed.split(".")
    return f"{head}.{claims.split('.')[1]}.{signature}"


def own_key(other: Issuer) -> str:
    """A header may carry a key (`jwk`) or say where one is: nobody asks there."""
    public = json.loads(other.jwks_file.read_text())["keys"][0]
    return other.token(headers={"kid": "mine", "jwk": public, "jku": "https://other.example/jwks"})


def claims_with(name: str, value: Any) -> bytes:
    said = {"iss": made.NAME, "aud": AUDIENCE, "sub": ALICE, "exp": int(time.time()) + 60, name: value}
    return json.dumps(said).encode()


def deep() -> str:
    return f"{made.base64url(b'[' * 2000)}.e30.eA"


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_pass_names_nobody(issuer: Issuer, stranger: Issuer, kind: str) -> None:
    make, says = BAD[kind]
    token = make(issuer, stranger)
    with pytest.raises(DeniedError, match=says) as refused:
        reader(issuer).subject(token)
    text = str(refused.value)
    assert "FASTCHECK_TOKEN_FILE" in text and f"audience {AUDIENCE}" in text
    assert len(text) < 600
    for part in token.split("."):
        assert len(part) < 8 or part not in text
    assert refused.value.__context__ is None or refused.value.__suppress_context__  # no traceback with more


@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "EdDSA"])
def test_no_confusion_of_algorithm_key_and_header_names_anybody(tmp_path: Path, algorithm: str) -> None:
    own, other = Issuer(tmp_path / "own.json"), Issuer(tmp_path / "other.json")
    for issuer in (own, other):
        issuer.add("k", algorithm)
    tokens = reader(own)
    assert tokens.subject(own.token()) == ALICE
    for what, token in made.confused(own, other).items():
        with pytest.raises(DeniedError):
            pytest.fail(f"{what}: {tokens.subject(token)}")


def test_two_issuers_with_one_key_id_are_never_mixed(tmp_path: Path) -> None:
    own, other = Issuer(tmp_path / "own.json"), Issuer(tmp_path / "other.json")
    for issuer in (own, other):
        issuer.add("k")
    tokens = reader(own)
    entries = [json.loads(issuer.jwks_file.read_text())["keys"][0] for issuer in (other, own)]
    made.replace(own.jwks_file, json.dumps({"keys": entries}))
    with pytest.raises(ConfigError, match="two keys with the same id"):
        reader(own)
    for _ in range(2):  # the daemon goes on with what it had
        assert tokens.subject(own.token()) == ALICE
        with pytest.raises(DeniedError, match="signature does not pass"):
            tokens.subject(other.token())


def test_a_file_of_keys_that_somebody_else_put_there_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a link, as Kubernetes swaps its files, too: what counts is whose the file behind it is."""
    own, other = Issuer(tmp_path / "own.json"), Issuer(tmp_path / "other.json")
    for issuer in (own, other):
        issuer.add("k")
    link = tmp_path / "jwks.json"
    link.symlink_to(own.jwks_file)
    at_link = Issuer(link)
    tokens = reader(at_link)
    assert tokens.subject(own.token()) == ALICE

    def swap(target: Path) -> None:
        new = tmp_path / "new"
        new.symlink_to(target)
        new.replace(link)

    def refused(why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            reader(at_link)
        with pytest.raises(DeniedError):
            tokens.subject(other.token())
        assert tokens.subject(own.token()) == ALICE
        assert why in caplog.text

    os.mkfifo(tmp_path / "pipe")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    shutil.copy(other.jwks_file, open_to_all / "jwks.json")
    for target, why in (
        (tmp_path / "pipe", "no plain file"),
        (Path("/dev/zero"), "no plain file"),
        (tmp_path, "no plain file"),
        (open_to_all / "jwks.json", "may be changed by everybody"),
    ):
        swap(target)
        refused(why)
    swap(other.jwks_file)
    if os.getuid() == 0:
        os.chown(other.jwks_file, 60001, -1)
        refused("belongs to another user")
    swap(own.jwks_file)
    own.add("k2")
    assert tokens.subject(own.token(kid="k2")) == ALICE, "the operator may swap links"


@settings(max_examples=100, deadline=None)
@given(payload=st.one_of(st.binary(max_size=300), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["iss", "aud", "sub", "exp", "nbf", "iat", "jti", "x"]), inner, max_size=6
    ), max_leaves=12,
).map(lambda said: json.dumps(said).encode())))  # fmt: skip
def test_whatever_a_good_key_signs_is_a_subject_or_refused(
    issuer: Issuer, tokens: Tokens, payload: bytes
) -> None:
    with pytest.raises(DeniedError):
        tokens.subject(issuer.signed(payload))


@settings(max_examples=100, deadline=None)
@given(
    token=st.text(max_size=200)
    | st.from_regex(r"[A-Za-z0-9_-]{0,80}\.[A-Za-z0-9_-]{0,80}\.[A-Za-z0-9_-]{0,80}")
)
def test_whatever_comes_as_a_token_is_refused(tokens: Tokens, token: str) -> None:
    with pytest.raises(DeniedError):
        tokens.subject(token)


def test_a_subject_fits_in_what_the_registry_takes_for_an_owner(issuer: Issuer) -> None:
    assert len("token/") + SUBJECT_BYTES_MAX == IDENTITY_BYTES_MAX
    assert reader(issuer).subject(issuer.token("a" * SUBJECT_BYTES_MAX)) == "a" * SUBJECT_BYTES_MAX


def test_new_keys_count_at_once_and_retired_ones_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = Issuer(tmp_path / "jwks.json")
    issuer.add("old")
    tokens = reader(issuer)
    old = issuer.token()
    assert tokens.subject(old) == ALICE
    issuer.add("new")
    assert tokens.subject(issuer.token(kid="new")) == tokens.subject(old) == ALICE
    issuer.retire("old")
    with pytest.raises(DeniedError, match="none of those"):
        tokens.subject(old)
    with caplog.at_level(logging.WARNING):
        made.replace(issuer.jwks_file, "{")
        assert tokens.subject(issuer.token(kid="new")) == ALICE
        assert tokens.subject(issuer.token(kid="new")) == ALICE
        issuer.jwks_file.unlink()
        assert tokens.subject(issuer.token(kid="new")) == ALICE
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("not used" in each for each in said), said


def entry(issuer: Issuer, of: str = "es256", **changes: Any) -> dict[str, Any]:
    found = next(e for e in json.loads(issuer.jwks_file.read_text())["keys"] if e["kid"] == of)
    return {name: value for name, value in (found | changes).items() if value is not None}


def test_keys_for_something_else_are_passed_over(issuer: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    others = [
        entry(issuer, use="enc", kid="a"), entry(issuer, alg="ES384", kid="b"), entry(issuer, crv="P-384", kid="c"),
        entry(issuer, kid=None), entry(issuer, kty="XX", kid="d"), entry(issuer, crv=["P-256"], kid="e"), 7, None,
        entry(issuer, "rs256", alg="RSA-OAEP", kid="f"), entry(issuer, kty=[], kid="g"), entry(issuer, kid=["h"]),
    ]  # fmt: skip
    path.write_text(json.dumps({"keys": [*others, entry(issuer, alg=None, use=None)]}))
    same = Issuer(path)
    same.keys = issuer.keys
    assert reader(same).subject(issuer.token(kid="es256")) == ALICE
    with pytest.raises(DeniedError, match="none of those"):
        reader(same).subject(issuer.token(kid="es256", headers={"kid": "a"}))


def test_a_file_of_keys_that_will_not_do_is_said(issuer: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    bad = Issuer(path)
    small = Issuer(tmp_path / "small.json")
    small.keys = {"k": ("RS256", rsa.generate_private_key(65537, 1024))}
    small.write()

    def keys(*entries: Any) -> str:
        return json.dumps({"keys": entries})

    good = entry(issuer)
    for text, says in (
        ("", "no JSON Web Key Set"), ("[]", "no JSON Web Key Set"), ('{"keys": 1}', "no JSON Web Key Set"),
        ("[" * 5000, "no JSON Web Key Set"), (keys(), "no key"), (keys(*[7] * (KEYS_MAX + 1)), "at most"),
        (keys(good, good), "two keys"), (keys(good | {"d": "x"}), "secret"), (keys({"kty": "oct", "k": "x"}), "secret"),
        (keys(good | {"x": "!"}), "damaged"), (small.jwks_file.read_text(), "2048 bits"), ("x" * 300_000, "more than"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match=says) as refused:
            reader(bad)
        assert "token_jwks_file" in str(refused.value) and len(str(refused.value)) < 400
    path.write_text(keys(good))
    reader(bad)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="everybody"):
        reader(bad)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        reader(bad)
