"""Documents as a schema's grammar spells them: the schema's key order, canonical numbers."""

from __future__ import annotations

import json
from typing import Any

from stemma.constrained.schema.json_text import encoded
from stemma.constrained.schema.numbers import exact, number_literal


def canonical_text(value: Any, order: dict[str, int]) -> str:
    """Compact JSON with keys by their rank in `order`, others behind as they come."""
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


def key_order(schema: Any) -> dict[str, int]:
    """The rank of each property's first mention in a schema's text, nested ones included."""
    ranks: dict[str, int] = {}
    _rank(schema, ranks)
    return ranks


def _rank(schema: Any, ranks: dict[str, int]) -> None:
    if isinstance(schema, list):
        for item in schema:
            _rank(item, ranks)
    if not isinstance(schema, dict):
        return
    late: list[str] = []
    for keyword, value in schema.items():
        if keyword == "properties" and isinstance(value, dict):
            for name in value:
                ranks.setdefault(name, len(ranks))
        if keyword == "required" and isinstance(value, list):
            late += [name for name in value if isinstance(name, str)]
        elif keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            late += list(value)
            late += [n for e in value.values() if isinstance(e, list) for n in e]
            _rank(list(value.values()), ranks)
        elif keyword in ("enum", "const"):
            for literal in value if isinstance(value, list) else [value]:
                for name in literal if isinstance(literal, dict) else ():
                    ranks.setdefault(name, len(ranks))
        else:
            _rank(
                list(value.values()) if isinstance(value, dict) and keyword not in KEYED else value,
                ranks,
            )
            if keyword in KEYED and isinstance(value, dict):
                _rank(list(value.values()), ranks)
    for name in late:
        ranks.setdefault(name, len(ranks))


KEYED = ("properties", "patternProperties", "definitions", "$defs")
