"""Random schemas of every keyword, and instances close to them, from a Random."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("a", "b", "c", "ab", "x-1")
STRINGS = ("", "a", "b", "ab", "abc", 'q"', "é\n", "2024-02-29", "x-1")
NUMBERS = (0, 1, 2, 3, -1, -7, 10, 12, 0.5, 1.5, -2.25, 100, 7.25)
PATTERNS = ("^a", "b$", "^x-", "a|b", "^[a-c]{2,3}$", "^a$")
SCALARS = (None, True, False, *NUMBERS, *STRINGS)


def random_instance(rng: Random, depth: int = 3) -> Any:
    """A small JSON value."""
    kind = rng.randrange(7 if depth else 4)
    if kind < 2:
        return rng.choice(SCALARS)
    if kind == 2:
        return rng.choice(STRINGS)
    if kind == 3:
        return rng.choice(NUMBERS)
    if kind == 4:
        return [random_instance(rng, depth - 1) for _ in range(rng.randrange(4))]
    names = rng.sample(NAMES, rng.randrange(4))
    return {name: random_instance(rng, depth - 1) for name in names}


def random_schema(rng: Random, depth: int = 2, has_refs: bool = True) -> Any:
    """A schema of 2020-12 with up to a few keywords; may refer to `#/$defs/d`."""
    schema = _schema(rng, depth, has_refs)
    if isinstance(schema, dict) and has_refs:
        schema = {"$defs": {"d": _schema(rng, 1, False)}, **schema}
    return schema


def _schema(rng: Random, depth: int, has_refs: bool) -> Any:
    if rng.random() < 0.08:
        return rng.random() < 0.6
    keywords = list(SCALAR_KEYWORDS)
    if depth:
        keywords += [*NESTED_KEYWORDS] * 2
    schema: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        keyword = rng.choice(keywords)
        if keyword == "$ref" and not has_refs:
            continue
        schema.update(_keyword(rng, keyword, depth, has_refs))
    return schema


SCALAR_KEYWORDS = (
    "type", "type", "type", "enum", "const", "length", "pattern", "bounds", "multipleOf",
    "format", "required", "counts", "items counts", "dependentRequired", "$ref",
)  # fmt: skip
NESTED_KEYWORDS = (
    "properties", "properties", "patternProperties", "additionalProperties", "propertyNames",
    "items", "prefixItems", "contains", "allOf", "anyOf", "oneOf", "not", "if",
    "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "unique",
)  # fmt: skip
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def _keyword(rng: Random, keyword: str, depth: int, has_refs: bool) -> dict[str, Any]:
    def sub() -> Any:
        return _schema(rng, depth - 1, has_refs)

    def count() -> int:
        return rng.randrange(4)

    match keyword:
        case "type":
            types = rng.sample(TYPES, rng.choice((1, 1, 2)))
            return {"type": types[0] if len(types) == 1 else types}
        case "enum":
            return {"enum": [random_instance(rng, 1) for _ in range(rng.randrange(1, 5))]}
        case "const":
            return {"const": random_instance(rng, 2)}
        case "length":
            return {rng.choice(("minLength", "maxLength")): count()}
        case "pattern":
            return {"pattern": rng.choice(PATTERNS)}
        case "bounds":
            bound = rng.choice(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
            return {bound: rng.choice(NUMBERS)}
        case "multipleOf":
            return {"multipleOf": rng.choice((1, 2, 3, 0.5, 0.25, 7))}
        case "format":
            return {"format": "date"}
        case "required":
            return {"required": rng.sample(NAMES, rng.randrange(3))}
        case "counts":
            return {rng.choice(("minProperties", "maxProperties")): count()}
        case "items counts":
            return {rng.choice(("minItems", "maxItems")): count()}
        case "dependentRequired":
            return {keyword: {rng.choice(NAMES): rng.sample(NAMES, rng.randrange(3))}}
        case "$ref":
            return {"$ref": "#/$defs/d"}
        case "properties":
            names = rng.sample(NAMES, rng.randrange(1, 4))
            schema = {"properties": {name: sub() for name in names}}
            return schema | ({"required": names[:1]} if rng.random() < 0.3 else {})
        case "patternProperties":
            return {keyword: {rng.choice(PATTERNS): sub()}}
        case "prefixItems" | "allOf" | "anyOf" | "oneOf":
            return {keyword: [sub() for _ in range(rng.choice((1, 2, 2, 3)))]}
        case "contains":
            schema = {"contains": sub()}
            for bound in ("minContains", "maxContains"):
                if rng.random() < 0.3:
                    schema[bound] = count()
            return schema
        case "if":
            return {"if": sub(), "then": sub(), "else": sub()}
        case "dependentSchemas":
            return {keyword: {rng.choice(NAMES): sub()}}
        case "unique":
            return {"uniqueItems": True, "items": {"enum": rng.sample(SCALARS, 3)}}
    return {keyword: sub()}
