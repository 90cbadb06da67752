"""Validates a finished document, for schemas that a grammar enforces only in part.

The only importer of jsonschema. Nothing is fetched: a reference out of the document, other than to
the standard's metaschemas, is an error of the document's.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NoReturn

import jsonschema
import jsonschema_specifications
import referencing.exceptions

MAX_ERRORS = 10


def validation_errors(schema: str, text: str) -> tuple[str, ...]:
    """Why `text` is not a valid document of the schema (JSON text): up to MAX_ERRORS lines
    "JSON pointer: message"; () where it is valid. Formats are asserted."""
    try:
        document = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return (f"/: not JSON: {error}",)
    except RecursionError:
        return ("/: nested too deeply",)
    found: list[str] = []
    try:
        for broken in _validator(schema).iter_errors(document):
            pointer = "".join(f"/{token}" for token in broken.absolute_path) or "/"
            found.append(f"{pointer}: {broken.message}")
            if len(found) == MAX_ERRORS:
                break
    except (referencing.exceptions.Unresolvable, RecursionError) as error:
        found.append(f"/: cannot be validated: {type(error).__name__}: {error}")
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    parsed = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    registry: Any = jsonschema_specifications.REGISTRY
    return kind(parsed, format_checker=kind.FORMAT_CHECKER, registry=registry)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
