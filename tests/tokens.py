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

    def by_public_key(self) -> str:
        """HMAC with the public key, which everybody has, as the secret."""
        kid, (_, key) = next(iter(self.keys.items()))
        secret = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        head = f"{encoded({'alg': 'HS256', 'kid': kid})}.{self.token().split('.')[1]}"
        return f"{head}.{base64url(hmac.new(secret, head.encode(), hashlib.sha256).digest())}"


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
