"""The schemas in docs/schemas: as users get them and closed: then a key that they do not know is an error."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"


@functools.cache
def _registry(*, closed: bool) -> Registry:
    """All files, by name."""
    resources = []
    for path in FOLDER.glob("*.json"):
        schema = json.loads(path.read_text())
        resources.append((path.name, Resource.from_contents(_closed(schema) if closed else schema)))
    return Registry().with_resources(resources)


def _closed(schema: Any) -> Any:
    """Objects may have no other keys than those that are named."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    # Where `properties` holds the words of a schema, not where it is itself the name of a property.
    if isinstance(schema.get("properties"), dict) and "required" in schema:
        inner["additionalProperties"] = False
    return inner


def of_command(*words: str) -> str:
    """The schema's name for a command: its own, or that of its group."""
    own = "-".join(words)
    return own if (FOLDER / f"{own}.json").is_file() else words[0]


def validator(name: str, *, closed: bool = False) -> Draft202012Validator:
    """For one file, with its references."""
    registry = _registry(closed=closed)
    return Draft202012Validator(registry.contents(f"{name}.json"), registry=registry)


def check(name: str, result: Any) -> None:
    """An output must be as its schema says, and the schema must know every key of it."""
    validator(name, closed=True).validate(result)
