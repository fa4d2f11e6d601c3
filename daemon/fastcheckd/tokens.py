"""Trainers' bearer tokens: signed JSON Web Tokens of an issuer that the operator trusts, as Kubernetes makes them.

The issuer's public keys come from a file (JWKS), read again when it changes; nothing is fetched. A key stands for one
algorithm, so what a token says of its own is either that or wrong: neither `none` nor a public key used as a shared
secret has a key here. Nothing of a token may go into a message or a log. The design is in docs/security.md.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from fastcheck_proto.conventions import check_token

from .certificates import signature
from .config import Config
from .errors import ConfigError, DeniedError

logger = logging.getLogger(__name__)

#: By which clocks may differ.
LEEWAY_S = 30
#: An issuer has a few keys of less than 1 KiB.
JWKS_BYTES_MAX = 256 << 10
KEYS_MAX = 64
RSA_BITS_MIN = 2048
#: `token/` and this is what the registry takes as an owner (`registry.owners.IDENTITY_BYTES_MAX`).
SUBJECT_BYTES_MAX = 154
_SUBJECT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@/-]{{0,{SUBJECT_BYTES_MAX - 1}}}")
#: Type and curve of a key → what it signs with, here.
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_REQUIRED = ["iss", "aud", "sub", "exp"]


class Tokens:
    """Says whose a token is. Used on one event loop.

    Args:
        config: with all three `token_*` keys.

    Raises:
        ConfigError: the file of keys is not usable.
    """

    def __init__(self, config: Config) -> None:
        assert config.token_jwks_file is not None
        self._path = config.token_jwks_file
        self._issuer = config.token_issuer
        self._audience = config.token_audience
        self._seen = signature(self._path)
        self._keys = _read_keys(self._path)

    def advice(self) -> str:
        """What a trainer needs, for whoever was refused."""
        return f"set FASTCHECK_TOKEN_FILE to a file with a token of issuer {self._issuer} for audience {self._audience}"

    def subject(self, token: str) -> str:
        """Whom a token names.

        Raises:
            DeniedError: it does not pass; why, without a word of the token.
        """
        self._refresh()
        try:
            check_token(token)
            header = jwt.get_unverified_header(token)
            key = self._keys.get(header.get("kid", ""))
            if key is None:
                raise self._denied(
                    "its key is none of those in token_jwks_file: another issuer's, or retired"
                )
            if "crit" in header:
                raise self._denied("it demands what is not known here (crit)")
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                options={"require": _REQUIRED},
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
            )
        except jwt.ExpiredSignatureError:
            raise self._denied("it has expired") from None
        except jwt.ImmatureSignatureError:
            raise self._denied("it is not valid yet: do the clocks differ?") from None
        except jwt.InvalidAudienceError:
            raise self._denied("it is for another audience (aud)") from None
        except jwt.InvalidIssuerError:
            raise self._denied("it is of another issuer (iss)") from None
        except (jwt.InvalidSignatureError, jwt.InvalidAlgorithmError):
            raise self._denied("its signature does not pass") from None
        except jwt.MissingRequiredClaimError as error:
            raise self._denied(f"it does not say its {error.claim}") from None
        # What its JSON can do to a parser, none of it with the token in a traceback.
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            raise self._denied("it is malformed") from None
        subject = claims["sub"]
        if not isinstance(subject, str) or not _SUBJECT.fullmatch(subject):
            raise self._denied(
                f"its subject (sub) must have 1 to {SUBJECT_BYTES_MAX} of the characters A-Z a-z 0-9 . _ : @ / - and "
                "begin with a letter or digit"
            )
        return subject

    def _denied(self, why: str) -> DeniedError:
        return DeniedError(f"this token does not pass: {why}; {self.advice()}")

    def _refresh(self) -> None:
        """Take the file's keys if it has changed and they are good."""
        seen = signature(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = _read_keys(self._path)
        except ConfigError as error:
            logger.warning("the changed file of keys is not used: %s", error)
        else:
            logger.info("the file of token keys has changed; %d keys are in use", len(self._keys))


def _read_keys(path: Path) -> dict[str, jwt.PyJWK]:
    """The keys that may sign tokens, by their ids; such as are for something else are passed over.

    Raises:
        ConfigError: it cannot be read, is no JWKS, has a secret in it, or none that may.
    """
    data = _read(path)
    if len(data) > JWKS_BYTES_MAX:
        raise _unusable(path, f"has more than {JWKS_BYTES_MAX} bytes")
    try:
        entries = json.loads(data)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        entries = None
    if not isinstance(entries, list) or len(entries) > KEYS_MAX:
        raise _unusable(path, f'is no JSON Web Key Set, {{"keys": [...]}} with at most {KEYS_MAX} of them')
    keys: dict[str, jwt.PyJWK] = {}
    for entry in entries:
        if isinstance(entry, dict) and (key := _key(path, entry)) is not None:
            if entry["kid"] in keys:
                raise _unusable(path, "has two keys with the same id (kid)")
            keys[entry["kid"]] = key
    if not keys:
        raise _unusable(path, "has no key with an id (kid) for RS256, ES256 or EdDSA")
    return keys


def _read(path: Path) -> bytes:
    """What the file behind any links holds. Only who may change this daemon, or root, may have put it there."""
    try:
        # Who opens a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_owner(path, os.fstat(descriptor))
            return os.read(descriptor, JWKS_BYTES_MAX + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from None


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(path, "is no plain file")
    if status.st_uid not in {0, os.geteuid()}:
        raise _unusable(path, "belongs to another user, who could sign tokens: make it root's or this user's")
    folders = (path.parent.stat(), path.resolve().parent.stat())
    if status.st_mode & stat.S_IWOTH or any(
        folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX for folder in folders
    ):
        raise _unusable(path, "may be changed by everybody, or its directory may: they could sign tokens")


def _key(path: Path, entry: dict[str, Any]) -> jwt.PyJWK | None:
    if "d" in entry or entry.get("kty") == "oct":
        raise _unusable(path, "has a secret key in it: a daemon needs the public ones alone")
    kid, kty, use = (entry.get(name) for name in ("kid", "kty", "use"))
    if not isinstance(kid, str) or not kid or use not in {None, "sig"} or not isinstance(kty, str):
        return None
    curve = entry.get("crv")
    algorithm = _ALGORITHMS.get((kty, curve)) if curve is None or isinstance(curve, str) else None
    if algorithm is None or entry.get("alg", algorithm) != algorithm:
        return None
    try:
        key = jwt.PyJWK(entry, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise _unusable(path, f"has a damaged {kty} key") from None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < RSA_BITS_MIN:
        raise _unusable(path, f"has an RSA key of less than {RSA_BITS_MIN} bits")
    return key


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"config key 'token_jwks_file': {path} {why}")
