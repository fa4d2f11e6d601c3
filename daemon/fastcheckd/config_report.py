"""A configuration for people who ask what a daemon would run with, and why: each key, its value, what decided it. Pure.

Today's keys name files that hold secrets and hold none themselves. A key that is called like a secret is hidden all
the same, so that one which comes later cannot be printed by mistake.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from .config import Config
from .config_sources import Origin

Json = dict[str, Any]

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?:^|_)(?:key|token|secret|password)$")


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
