"""Where a configuration comes from, and how its text becomes values.

A value comes from a flag (`--set key=value`), else the environment (`FASTCHECK_<KEY>`), else the YAML file, else the
default beside its field. Unknown keys are errors. Nothing else in the daemon reads the environment.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .config import Config, Voter
from .errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_PREFIXES = list(enumerate("KMGT", 1))
_UNITS = {"": 1} | {p: 1000**i for i, p in _PREFIXES} | {f"{p}I": 1024**i for i, p in _PREFIXES}
HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?:^|_)(?:key|token|secret|password)$")


@dataclass(frozen=True)
class Origin:
    """What decided a key's value."""

    #: `default`, `file`, `variable` or `flag`.
    kind: str
    #: The file, the variable, the flag; empty for a default.
    where: str = ""


DEFAULT = Origin("default")


def parse_size(text: str | int) -> int:
    """Bytes from an integer or from text such as `8GiB`, `500 MB`."""
    if isinstance(text, bool):
        raise ValueError("is not a size")
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 8GiB or 500MB")
    unit = (match[2] or "").upper().rstrip("B")
    return int(float(match[1]) * _UNITS[unit])


def load_config(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """Build the config from defaults, a YAML file, the environment and `key=value` overrides.

    Raises:
        ConfigError: the file cannot be read or parsed, a key is unknown, or a value is not valid.
    """
    return load_with_origins(path, environment=environment, overrides=overrides)[0]


def load_with_origins(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Config, dict[str, Origin]]:
    """The same, and for every key what decided its value. Raises as `load_config`."""
    fields = [field.name for field in dataclasses.fields(Config)]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, DEFAULT)

    def take(key: str, value: Any, origin: Origin) -> None:
        """What comes later wins."""
        if key not in origins:
            raise ConfigError(f"unknown config key {key!r}; known keys: {', '.join(sorted(fields))}")
        values[key], origins[key] = value, origin

    if path is not None:
        for key, value in _read(path).items():
            take(key, value, Origin("file", str(path)))
    for key in fields:
        variable = f"FASTCHECK_{key.upper()}"
        if (text := (environment or {}).get(variable)) is not None:
            take(key, _parse(variable, text), Origin("variable", variable))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override!r}: write --set key=value")
        take(key, _parse(f"--set {key}", text), Origin("flag", f"--set {key}"))
    return Config(**{key: _convert(key, value) for key, value in values.items()}), origins


def _read(path: Path) -> dict[Any, Any]:
    """The pairs in a YAML file."""
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} must hold 'key: value' pairs")
    return loaded or {}


def _parse(what: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}={text!r} is not valid YAML: {error}") from None


def _convert(key: str, value: Any) -> Any:  # noqa: PLR0911, PLR0912  one line per kind of field
    """Turn a YAML value into the field's type, or say which key is wrong."""
    wanted = str(next(f.type for f in dataclasses.fields(Config) if f.name == key))
    try:
        if key == "voters":
            return tuple(_voter(v) for v in value or ())
        if key == "labels":
            return _labels(value)
        if key.endswith(("_bytes", "_bytes_per_s")):
            return parse_size(value)
        if wanted.startswith("Path"):
            return None if value is None else Path(str(value))
        if wanted == "bool":
            if not isinstance(value, bool):
                raise ValueError(f"must be on or off, not {value!r}")
            return value
        if wanted == "int":
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"must be a whole number, not {value!r}")
            return value
        if wanted == "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"must be a number, not {value!r}")
            return float(value)
        if key == "pacing" and value is False:
            return "off"  # which YAML takes for a bool
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"must be text, not {value!r}: put it in quotes")
        return str(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"config key {key!r}: {error}") from None


def _voter(value: Any) -> Voter:
    names = {"node_id", "registry_address", "raft_address"}
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"each voter needs exactly the keys {', '.join(sorted(names))}")
    return Voter(**{k: str(v) for k, v in value.items()})


def _labels(value: Any) -> dict[str, str]:
    """A mapping, or text such as `rack=a1,zone=b`."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if any(not separator for _, separator, _ in pairs):
            raise ValueError(f"{value!r} is not of the form rack=a1,zone=b")
        return {name.strip(): text.strip() for name, _, text in pairs}
    if not isinstance(value or {}, dict):
        raise ValueError("must be a mapping, such as {rack: a1}")
    return {str(name): str(text) for name, text in (value or {}).items()}


Json = dict[str, Any]


def is_secret(key: str) -> bool:
    """Whether a key's value is not to be shown; the name of a file with a secret (`*_file`) may be."""
    return _SECRET.search(key) is not None


def report(config: Config, origins: Mapping[str, Origin]) -> Json:
    """`{"keys": [{"key", "value", "origin", "where"}]}`, in the order of the config's fields; JSON-ready.

    Args:
        origins: of every key, as `load_with_origins` gives them.
    """
    values: Json = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return {
        "keys": [
            {
                "key": key,
                "value": HIDDEN if is_secret(key) and value else value,
                "origin": origins[key].kind,
                "where": origins[key].where,
            }
            for key, value in values.items()
        ]
    }
