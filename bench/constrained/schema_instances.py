"""Instances of a schema drawn from a seed, and mutations of them that break it.

`jsonschema` is the judge of both: a valid instance is one that it accepts, an invalid one a
mutation that it refuses. Formats count as far as it checks them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema

from .schema_words import FORMATS, KEY_PATTERNS, PATTERNS, name, sentence

MAX_DEPTH = 12  # of references; deeper only what is required is written
NUM_TRIES = 12  # for each instance asked for
MAX_CHARS = 8000  # of an instance


def instances(schema: dict[str, Any], seed: int, count: int) -> tuple[list[Any], list[Any]]:
    """Up to `count` valid and `count` invalid instances, distinct."""
    rng = random.Random(seed)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    drawing = _Drawing(schema, rng)
    valid: list[Any] = []
    for number in range(NUM_TRIES * count):
        if len(valid) == count:
            break
        drawn = drawing.value(schema, MAX_DEPTH if number % 3 == 2 else number % 3 * 3)
        is_new = drawn not in valid and len(json.dumps(drawn)) <= MAX_CHARS
        if is_new and validator.is_valid(drawn):
            valid.append(drawn)
    invalid: list[Any] = []
    for number in range(NUM_TRIES * count if valid else 0):
        if len(invalid) == count:
            break
        mutated = _mutated(valid[number % len(valid)], rng)
        if mutated not in invalid and not validator.is_valid(mutated):
            invalid.append(mutated)
    return valid, invalid


class _Drawing:
    """Draws values of subschemas of one document."""

    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root, self._rng = root, rng

    def value(self, schema: Any, depth: int) -> Any:
        """`depth`: how many levels may still have what is not required."""
        rng = self._rng
        schema = self._flat(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        types = schema.get("type") or ("object" if "properties" in schema else "string")
        kind = rng.choice(types) if isinstance(types, list) else types
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        return rng.random() < 0.5 if kind == "boolean" else None

    def _flat(self, schema: Any, depth: int) -> dict[str, Any]:
        """With references followed, one alternative chosen, and `allOf` merged in."""
        if isinstance(schema, bool) or not schema:
            return {"type": self._rng.choice(("string", "integer", "null"))}
        flat: dict[str, Any] = {}
        if "$ref" in schema:
            flat = self._joined(flat, self._flat(self._target(schema["$ref"]), depth))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                choice = schema[keyword]
                one = choice[-1] if depth <= 0 else self._rng.choice(choice)
                flat = self._joined(flat, self._flat(one, depth) if _is_whole(one) else one)
        for part in schema.get("allOf", ()):
            flat = self._joined(flat, self._flat(part, depth))
        own = {k: v for k, v in schema.items() if k not in ("$ref", "anyOf", "oneOf", "allOf")}
        return self._joined(flat, own)

    def _joined(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        joined = {**one, **other}
        for keyword in ("properties", "patternProperties"):
            if keyword in one and keyword in other:
                joined[keyword] = {**one[keyword], **other[keyword]}
        if "required" in one and "required" in other:
            joined["required"] = [*one["required"], *other["required"]]
        return joined

    def _target(self, reference: str) -> Any:
        found: Any = self._root
        for token in reference.removeprefix("#").split("/")[1:]:
            found = found[token]
        return found

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, found = self._rng, {}
        required = schema.get("required", ())
        for key, value in schema.get("properties", {}).items():
            if key in required or (depth > 0 and rng.random() < 0.5):
                found[key] = self.value(value, depth - 1)
        for pattern, value in schema.get("patternProperties", {}).items():
            for key in KEY_PATTERNS.get(pattern, ("_private", "main")):
                if key not in found and depth > 0 and rng.random() < 0.5:
                    found[key] = self.value(value, depth - 1)
        others = schema.get("additionalProperties", True)
        if (
            others is not False
            and depth > 0
            and rng.random() < (0.5 if others is not True else 0.1)
        ):
            key = name(rng)
            if key not in schema.get("properties", {}):
                found[key] = self.value(others, depth - 1)
        return found

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        items = schema.get("items", {})
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 3), max(least, 3 if depth > 0 else 0))
        size = self._rng.randint(least, max(least, most))
        if isinstance(items, list):
            return [self.value(item, depth - 1) for item in items[: max(size, 1)]]
        return [self.value(items, depth - 1) for _ in range(size)]

    def _string(self, schema: dict[str, Any]) -> str:
        rng = self._rng
        if "pattern" in schema:
            return rng.choice(PATTERNS.get(schema["pattern"], ("1.2.3",)))
        if schema.get("format") in FORMATS:
            return rng.choice(FORMATS[schema["format"]])
        text = sentence(rng, rng.randint(1, 8))
        if rng.random() < 0.1:
            text = text.replace(" ", " \N{LATIN SMALL LETTER U WITH DIAERESIS}\n", 1)
        return text[: schema.get("maxLength")]

    def _number(self, schema: dict[str, Any], kind: str) -> float:
        low = schema.get("minimum", -1000)
        high = schema.get("maximum", max(low, 0) + 1000)
        if kind == "integer" or self._rng.random() < 0.3:
            return self._rng.randint(int(low), int(high))
        return round(self._rng.uniform(low, high), 2)


def _is_whole(schema: Any) -> bool:
    """Whether it says what a value is, not only what an object must have."""
    return isinstance(schema, bool) or set(schema) != {"required"}


def _mutated(value: Any, rng: random.Random) -> Any:
    """A copy that differs in one place."""
    changed = [copy.deepcopy(value)]
    places = list(_places(changed, 0))
    container, key = rng.choice(places)
    kind = rng.randrange(4)
    current = container[key]
    if kind == 0 and isinstance(container, dict):
        del container[key]
    elif kind == 1 and isinstance(current, dict):
        current[name(rng) + "Extra"] = rng.choice((1, "x", None))
    elif kind == 2 and isinstance(current, str):
        container[key] = rng.choice((current + "\x00?", current * 40, "", current[:-1]))
    elif kind == 2 and isinstance(current, (int, float)) and not isinstance(current, bool):
        container[key] = rng.choice((-current - 1, current + 0.25, current * 10**6 + 1))
    else:
        container[key] = rng.choice((None, 7, "other", [], {}, True, [1], {"a": 1}))
    return changed[0]


def _places(container: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    keys = range(len(container)) if isinstance(container, list) else list(container)
    for key in keys:
        yield container, key
        if isinstance(container[key], (dict, list)) and depth < 20:
            yield from _places(container[key], depth + 1)
