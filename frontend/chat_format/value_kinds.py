"""Which kinds of JSON value a schema may allow, as far as its own words tell: formats that write
values without quotes are read by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Kinds = frozenset[str]
ANY: Kinds = frozenset(("null", "boolean", "number", "string", "array", "object"))
STRING: Kinds = frozenset(("string",))

_MAX_DEPTH = 16
_OF_TYPE = {"integer": "number"}


def kinds_of(schema: object, root: object, depth: int = 0) -> Kinds:
    """At least the kinds that it allows; `root`: the schema within which its references point."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY
    found = ANY
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found &= kinds_of(_target(root, reference), root, depth + 1)
    types = schema.get("type")
    if isinstance(types, str | list):
        named = [types] if isinstance(types, str) else types
        found &= frozenset(_OF_TYPE.get(name, name) for name in named if isinstance(name, str))
    if "const" in schema:
        found &= {kind_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= frozenset(map(kind_of, schema["enum"]))
    for keyword in ("anyOf", "oneOf"):
        parts = schema.get(keyword)
        if isinstance(parts, list) and parts:
            found &= _union(kinds_of(part, root, depth + 1) for part in parts)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= kinds_of(part, root, depth + 1)
    return found


def parameter_kinds(schema: object, name: str) -> Kinds:
    """The kinds of an object's property; any, where the schema does not list it."""
    listed = _listed(schema)
    return kinds_of(listed[name], schema) if name in listed else ANY


def parameter_names(schema: object) -> Sequence[str]:
    """The properties that an object's schema lists, in its order."""
    return [*_listed(schema)]


def _listed(schema: object) -> Mapping[str, Any]:
    found = schema
    for _ in range(_MAX_DEPTH):
        if not isinstance(found, Mapping) or not isinstance(found.get("$ref"), str):
            break
        found = _target(schema, found["$ref"])
    listed = found.get("properties") if isinstance(found, Mapping) else None
    return listed if isinstance(listed, Mapping) else {}


def kind_of(value: object) -> str:
    """The kind of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _union(parts: Iterable[Kinds]) -> Kinds:
    return frozenset().union(*parts)


def _target(root: object, reference: str) -> Any:
    """What a pointer within the root points to; None elsewhere."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for token in reference[1:].split("/")[1:]:
        token = unquote(token).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and token in found:
            found = found[token]
        elif isinstance(found, list) and token.isdigit() and int(token) < len(found):
            found = found[int(token)]
        else:
            return None
    return found
