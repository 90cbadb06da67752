"""Documents as a schema's grammar spells them: the schema's key order, canonical numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from stemma.constrained.schema.json_text import encoded
from stemma.constrained.schema.numbers import exact, number_literal


def canonical_text(value: Any, order: dict[str, int]) -> str:
    """Compact JSON with keys by their rank in `order`, others after them as given."""
    if isinstance(value, str):
        return encoded(value)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, (int, float)):
        text = number_literal(exact(value))
        assert text is not None
        return text
    if isinstance(value, list):
        return "[" + ",".join(canonical_text(item, order) for item in value) + "]"
    keys = sorted(value, key=lambda key: order.get(key, len(order)))
    return "{" + ",".join(f"{encoded(k)}:{canonical_text(value[k], order)}" for k in keys) + "}"


def spellings(value: Any) -> Iterator[str]:
    """Its canonical texts under every order of keys."""
    if isinstance(value, list):
        for items in itertools.product(*(tuple(spellings(item)) for item in value)):
            yield "[" + ",".join(items) + "]"
    elif isinstance(value, dict):
        members = [tuple(f"{encoded(k)}:{t}" for t in spellings(v)) for k, v in value.items()]
        for order in itertools.permutations(members):
            for texts in itertools.product(*order):
                yield "{" + ",".join(texts) + "}"
    else:
        yield canonical_text(value, {})


def in_decimals(value: Any) -> Any:
    """The same JSON with decimals for floats, so that validators compute exactly."""
    return json.loads(json.dumps(value), parse_float=Decimal)


def key_order(schema: Any) -> dict[str, int]:
    """The rank of each key: properties by first mention in the schema's text, then others."""
    names: dict[str, None] = {}
    late: dict[str, None] = {}
    _mention(schema, names, late)
    return {name: rank for rank, name in enumerate(names | late)}


def _mention(schema: Any, names: dict[str, None], late: dict[str, None]) -> None:
    if isinstance(schema, list):
        for item in schema:
            _mention(item, names, late)
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        inner = value
        if keyword in ("properties", "patternProperties", "definitions", "$defs"):
            names.update(dict.fromkeys(value if keyword == "properties" else ()))
            inner = list(value.values())
        elif keyword == "required" and isinstance(value, list):
            late.update(dict.fromkeys(value))
        elif keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            late.update(dict.fromkeys(value))
            for entry in value.values():
                late.update(dict.fromkeys(entry if isinstance(entry, list) else ()))
            inner = [entry for entry in value.values() if isinstance(entry, dict)]
        elif keyword in ("enum", "const"):
            for literal in value if isinstance(value, list) else [value]:
                names.update(dict.fromkeys(literal if isinstance(literal, dict) else ()))
            continue
        _mention(inner, names, late)
