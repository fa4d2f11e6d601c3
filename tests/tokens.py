"""Tokens for tests: an issuer with keys of each kind, good tokens and what attackers make of them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

NAME, AUDIENCE = "https://issuer.example", "fastcheck"
#: Of the form that Kubernetes gives a service account's.
ALICE, BOB = "system:serviceaccount:research:alice", "system:serviceaccount:research:bob"
_TO_JWK = {"RS256": RSAAlgorithm.to_jwk, "ES256": ECAlgorithm.to_jwk, "EdDSA": OKPAlgorithm.to_jwk}


def new_key(algorithm: str) -> Any:
    if algorithm == "RS256":
        return rsa.generate_private_key(65537, 2048)
    return (
        ec.generate_private_key(ec.SECP256R1())
        if algorithm == "ES256"
        else ed25519.Ed25519PrivateKey.generate()
    )


class Issuer:
    """Signs tokens, and writes its public keys into `jwks_file`."""

    def __init__(self, jwks_file: Path) -> None:
        self.jwks_file = jwks_file
        self.keys: dict[str, tuple[str, Any]] = {}

    def add(self, kid: str, algorithm: str = "ES256") -> None:
        """One more key, in the file from now on."""
        self.keys[kid] = (algorithm, new_key(algorithm))
        self.write()

    def retire(self, kid: str) -> None:
        """Takes a key's public half out of the file; it can still sign."""
        self.write(without=kid)

    def write(self, without: str = "") -> None:
        entries = [
            {**_TO_JWK[algorithm](key.public_key(), as_dict=True), "kid": kid, "use": "sig", "alg": algorithm}
            for kid, (algorithm, key) in self.keys.items()
            if kid != without
        ]
        replace(self.jwks_file, json.dumps({"keys": entries}))

    def settings(self) -> dict[str, Any]:
        """The config keys of a daemon that takes these tokens."""
        return {"token_jwks_file": self.jwks_file, "token_issuer": NAME, "token_audience": AUDIENCE}

    def token(
        self, subject: str = ALICE, *, kid: str = "", headers: dict | None = None, **claims: Any
    ) -> str:
        """A good one, but for the given claims; None leaves one out."""
        kid = kid or next(iter(self.keys))
        algorithm, key = self.keys[kid]
        now = int(time.time())
        said = {
            "iss": NAME,
            "aud": [AUDIENCE],
            "sub": subject,
            "iat": now,
            "nbf": now,
            "exp": now + 3600,
        } | claims
        said = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(said, key, algorithm, headers={"kid": kid, **(headers or {})})

    def signed(self, payload: bytes, *, kid: str = "") -> str:
        """Any bytes at all, signed properly."""
        kid = kid or next(iter(self.keys))
        algorithm, key = self.keys[kid]
        return jwt.PyJWS().encode(payload, key, algorithm, headers={"kid": kid})

    def unsigned(self, **header: Any) -> str:
        """What a token says, with a header of the attacker's and no signature worth the name."""
        return forged({"alg": "none", "kid": next(iter(self.keys)), **header}, self.token(), b"x")

    def by_public_key(self, form: str = "PEM", algorithm: str = "HS256") -> str:
        """HMAC with the public key, which everybody has, as the secret, in one of the forms that it is written in."""
        kid, (_, key) = next(iter(self.keys.items()))
        entries = json.loads(self.jwks_file.read_text())
        info = serialization.PublicFormat.SubjectPublicKeyInfo
        secret = {
            "PEM": key.public_key().public_bytes(serialization.Encoding.PEM, info),
            "DER": key.public_key().public_bytes(serialization.Encoding.DER, info),
            "JWK": json.dumps(next(each for each in entries["keys"] if each["kid"] == kid)).encode(),
            "JWKS": self.jwks_file.read_bytes(),
            "nothing": b"",
        }[form]
        head = f"{encoded({'alg': algorithm, 'kid': kid})}.{self.token().split('.')[1]}"
        digest = {"HS256": hashlib.sha256, "HS512": hashlib.sha512}[algorithm]
        return f"{head}.{base64url(hmac.new(secret, head.encode(), digest).digest())}"


def confused(own: Issuer, other: Issuer) -> dict[str, str]:
    """What the advisories of the libraries for tokens since 2022 warn of; `other` has keys of the same ids.

    Each is a way to have a verifier take another algorithm, key or header than its operator meant.
    """
    kid, (algorithm, _) = next(iter(own.keys.items()))
    theirs = json.loads(other.jwks_file.read_text())["keys"][0]
    url = "https://other.example/jwks"
    found = {
        f"signed by nobody, alg {alg!r}": own.unsigned(alg=alg)
        for alg in (
            "none",
            "None",
            "nOnE",
            "NONE",
            "",
            None,
            0,
            ["none"],
            {"none": 1},
            [algorithm],
            algorithm.lower(),
        )
    }
    found |= {
        f"{algorithm} with the public key as {form}": own.by_public_key(form, algorithm)
        for algorithm in ("HS256", "HS512")
        for form in ("PEM", "DER", "JWK", "JWKS", "nothing")
    }
    found |= {
        f"of another's key, with {', '.join(headers)}": other.token(headers=headers, kid=kid)
        for headers in (
            {"jwk": theirs}, {"jku": url}, {"x5u": url}, {"x5c": ["AAAA"]}, {"x5t": "AAAA"},
            {"jwk": theirs, "jku": url},
            {"kid": f"{kid}\0"}, {"kid": f" {kid}"}, {"kid": "../../../../dev/null"}, {"kid": str(other.jwks_file)},
            {"kid": f"file://{other.jwks_file}"}, {"kid": "' OR '1'='1"}, {"kid": ""},
        )
    }  # fmt: skip
    good = own.token()
    _, claims, signature = good.split(".")
    bare = {"alg": algorithm, "kid": kid}
    found |= {
        "with a key id that is no text": forged({"alg": algorithm, "kid": {kid: 1}}, good, b"x"),
        "with a key id that is a list": forged({"alg": algorithm, "kid": [kid]}, good, b"x"),
        "signed with zeros": forged(bare, good, bytes(64)),
        "signed with nothing": forged(bare, good, b""),
        "with the header of another": f"{encoded(bare | {'typ': 'x'})}.{claims}.{signature}",
        "with an extension that must be known": own.token(headers={"crit": ["exp2"], "exp2": 1}),
        "with b64 that must be known": own.token(headers={"crit": ["b64"], "b64": True}),
        "with nothing that must be known": own.token(headers={"crit": []}),
        "with its claims left out": f"{encoded(bare | {'b64': False, 'crit': ['b64']})}..{signature}",
        "with b64 that nobody demands": forged(bare | {"b64": False}, good, b"x"),
        "encrypted": f"{encoded({'alg': 'dir', 'enc': 'A256GCM', 'kid': kid, 'zip': 'DEF'})}.a.b.c.d",
        "of a part of the issuer's name": own.token(iss=NAME[:-1]),
        "of a letter of the issuer's name": own.token(iss="h"),
        "of an empty issuer": own.token(iss=""),
        "of several issuers": own.signed(_claims(iss=[NAME, "https://other.example"])),
        "of an issuer in an object": own.signed(_claims(iss={NAME: 1})),
        "for a part of the audience": own.token(aud=AUDIENCE[:-1]),
        "for an audience in an object": own.signed(_claims(aud={AUDIENCE: 1})),
        "for an audience in a list of lists": own.signed(_claims(aud=[[AUDIENCE]])),
        "that ends never": own.signed(_claims(exp=None)),
        "that ends in a list": own.signed(_claims(exp=[int(time.time()) + 60])),
        "with a claim as deep as a stack": own.signed(b'{"a":' * 600 + b"1" + b"}" * 600),
        "with a number that takes long to read": own.signed(b'{"exp":' + b"9" * 2500 + b"}"),
    }
    return found


def _claims(**said: Any) -> bytes:
    return json.dumps(
        {"iss": NAME, "aud": AUDIENCE, "sub": ALICE, "exp": int(time.time()) + 60} | said
    ).encode()


def replace(path: Path, text: str) -> None:
    """As whoever renews a file does it: at once, by another file."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def encoded(part: Any) -> str:
    return base64url(json.dumps(part).encode())


def forged(header: Any, token: str, signature: bytes) -> str:
    """A token's claims under another header and signature."""
    return f"{encoded(header)}.{token.split('.')[1]}.{base64url(signature)}"
