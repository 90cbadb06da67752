"""Tells a JSON Schema from an example of what is wanted, which would constrain nothing.

A schema may have any words beside those of the standard, and they mean nothing; so an example such
as `{"name": "Ann"}` is a valid schema of every document. Nobody means that one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidProgram

# Those that constrain or refer, in any dialect: a test holds them equal to `constrained`'s table.
KEYWORDS = frozenset((
    "$anchor", "$defs", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef", "$ref",
    "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains",
    "contentEncoding", "contentMediaType", "definitions", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if",
    "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains",
    "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern",
    "patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "type",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
))  # fmt: skip
_ANNOTATIONS = frozenset((
    "title", "description", "default", "example", "examples", "deprecated", "discriminator",
    "externalDocs", "nullable", "readOnly", "writeOnly", "xml", "contentSchema", "id",
))  # fmt: skip
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


def require_schema(schema: Mapping[str, Any], field: str) -> None:
    """Raises InvalidProgram for an object that has words, but none of a schema."""
    own = [name for name in schema if name not in _ANNOTATIONS and not _is_extension(name)]
    if not own or "$schema" in schema or not KEYWORDS.isdisjoint(schema):
        return
    wanted = {"type": "object", "properties": {name: _type_of(schema[name]) for name in own}}
    shown = json.dumps({**wanted, "required": own}, ensure_ascii=False, default=str)
    allowed = f"a JSON Schema; for objects of this kind {_cut(shown)}; {{}} for any JSON"
    raise InvalidProgram.of(field, dict(schema), allowed)


def _is_extension(name: object) -> bool:
    return isinstance(name, str) and name.startswith(("$", "x-"))


def _type_of(value: object) -> dict[str, Any]:
    """The schema of what an example has in a place, unless that is one already."""
    if isinstance(value, Mapping):
        return {"type": "object"} if KEYWORDS.isdisjoint(value) else dict(value)
    return {"type": _TYPES.get(type(value), "null")}


def _cut(text: str) -> str:
    return text if len(text) <= 400 else text[:400] + "..."
