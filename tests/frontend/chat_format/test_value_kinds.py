"""Which kinds of value a schema's own words allow."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.frontend.chat_format.value_kinds import ANY, kinds_of, parameter_kinds

ROOT: dict[str, Any] = {
    "$defs": {
        "Text": {"type": "string"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Args": {"properties": {"city": {"$ref": "#/$defs/Text"}}},
        "a/b": {"type": "null"},
    },
    "$ref": "#/$defs/Args",
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({}, ANY),
        (True, ANY),
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 2.5, None, True]}, {"string", "number", "null", "boolean"}),
        ({"const": []}, {"array"}),
        ({"anyOf": [{"type": "string"}, {"const": {}}]}, {"string", "object"}),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": [None, 1]}]}, {"null"}),
        ({"$ref": "#/$defs/Text"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"null"}),
        ({"$ref": "#/$defs/Loop"}, ANY),
        ({"$ref": "#/$defs/None"}, ANY),
        ({"$ref": "https://example.org/x"}, ANY),
        ({"type": 7, "enum": "x", "anyOf": {}, "allOf": 1}, ANY),
    ],
)
def test_kinds_are_those_that_the_schema_names(schema: Any, kinds: Any) -> None:
    assert kinds_of(schema, ROOT) == kinds


def test_a_parameters_kinds_are_found_behind_references() -> None:
    assert parameter_kinds(ROOT, "city") == {"string"}
    assert parameter_kinds(ROOT, "other") == ANY == parameter_kinds(None, "city")
