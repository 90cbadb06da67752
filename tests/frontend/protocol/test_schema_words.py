"""What is a schema, and what an example of the document that is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.constrained.schema.keywords import KEYWORDS
from stemma.errors import InvalidProgram
from stemma.frontend.protocol import schema_words
from stemma.frontend.protocol.constraint import constraint_of, schema_text

EXAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"name": "Ann", "age": 3}, '"name": {"type": "string"}, "age": {"type": "integer"}'),
    ({"title": "Dune", "author": "Herbert"}, '"author": {"type": "string"}'),
    ({"city": {"type": "string", "minLength": 1}}, '"city": {"type": "string", "minLength": 1}'),
    ({"tags": ["a"], "by": {"id": 1}, "ok": True, "x": None, "share": 0.5},
     '"tags": {"type": "array"}, "by": {"type": "object"}, "ok": {"type": "boolean"}, '
     '"x": {"type": "null"}, "share": {"type": "number"}'),
    ({"name": "person", "strict": True, "schema": {"type": "object"}},
     '"schema": {"type": "object"}'),
]  # fmt: skip


@pytest.mark.parametrize(("example", "written"), EXAMPLES)
def test_an_example_is_refused_with_the_schema_to_write(
    example: dict[str, Any], written: str
) -> None:
    with pytest.raises(InvalidProgram) as caught:
        constraint_of(json_schema=example)
    message = str(caught.value)
    assert message.startswith("json_schema={") and written in message
    assert '{"type": "object", "properties": {' in message and caught.value.field == "json_schema"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object", "name": "Ann"},
        {"properties": {"name": {"unit": "cm"}}},
        {"title": "Anything", "description": "any JSON"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "mine": 1},
        {"$comment": "anything"},
        {"x-order": 3},
        {"discriminator": {"propertyName": "kind"}, "xml": {}, "externalDocs": {"url": ""}},
        {"enum": [1, 2]},
        {"$ref": "#/$defs/a", "$defs": {"a": {}}},
    ],
)
def test_a_schema_is_taken_with_words_of_ones_own(schema: Any) -> None:
    assert schema_text(schema)


def test_the_words_are_those_that_are_enforced() -> None:
    assert set(KEYWORDS) == schema_words.KEYWORDS
