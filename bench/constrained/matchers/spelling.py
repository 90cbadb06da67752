"""How a JSON value is spelled for a grammar of compact JSON: canonical text, orders of properties.

A number without fraction is spelled as an integer: JSON Schema takes 1.0 and 1 for the same value.
Other numbers have no exponent.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

MAX_PERMUTED_KEYS = 5
MAX_SPELLINGS = 500
MAX_CHARS = 100_000


def mentioned_names(schema: object) -> list[str]:
    """Property names in the order in which the document first mentions them, depth-first."""
    names: dict[str, None] = {}
    _mention(schema, names)
    return list(names)


def spellings(value: object, names: Iterable[str]) -> Iterator[str]:
    """Distinct texts of `value`: properties as in `names` (others last), then as given, then every
    order of the objects with at most MAX_PERMUTED_KEYS, up to MAX_SPELLINGS or MAX_CHARS."""
    rank = {name: i for i, name in enumerate(names)}
    orders = itertools.chain([_ranked(value, rank), value], _permuted(value))
    seen: set[str] = set()
    num_chars = 0
    for one in itertools.islice(orders, MAX_SPELLINGS):
        text = spelled(one)
        if text not in seen:
            yield text
        seen.add(text)
        num_chars += len(text)
        if num_chars > MAX_CHARS:
            return


def spelled(value: object) -> str:
    """Compact JSON, properties as given."""
    if isinstance(value, Mapping):
        members = (f"{_string(key)}:{spelled(item)}" for key, item in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    if isinstance(value, float):
        return _number(value)
    return _string(value)


def _string(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")


def _mention(schema: object, names: dict[str, None]) -> None:
    if isinstance(schema, list):
        for item in schema:
            _mention(item, names)
    elif isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            names.update(dict.fromkeys(properties))
        for item in schema.values():
            _mention(item, names)


def _ranked(value: Any, rank: Mapping[str, int]) -> Any:
    if isinstance(value, list):
        return [_ranked(item, rank) for item in value]
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: rank.get(key, len(rank)))
        return {key: _ranked(value[key], rank) for key in keys}
    return value


def _permuted(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for items in itertools.product(*map(_bounded, value)):
            yield list(items)
    elif isinstance(value, dict):
        orders: Iterable[tuple[str, ...]] = [tuple(value)]
        if len(value) <= MAX_PERMUTED_KEYS:
            orders = itertools.permutations(value)
        choices = {key: _bounded(item) for key, item in value.items()}
        for order in orders:
            for items in itertools.product(*map(choices.__getitem__, order)):
                yield dict(zip(order, items, strict=True))
    else:
        yield value


def _bounded(value: Any) -> list[Any]:
    """`itertools.product` consumes its arguments entirely."""
    return list(itertools.islice(_permuted(value), MAX_SPELLINGS))
