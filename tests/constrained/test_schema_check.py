"""The report on a schema: what its author is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stemma.constrained.schema_check import SchemaReport, check_schema
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2},
        "born": {"type": "string", "format": "date"},
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    },
    "required": ["name", "tags", "born", "share"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v", "kids"],
}
REFUSED = {
    "properties": {
        "n": {"type": "integer", "multipleOf": 12345},
        "p": {"pattern": "(a)\\1"},
        "r": {"$ref": "other.json"},
        "u": {"not": {"uniqueItems": True}},
    }
}


def report_on(schema: Any, **options: Any) -> SchemaReport:
    return check_schema(GrammarSpec("json_schema", json.dumps(schema), **options))


@pytest.mark.parametrize(
    "schema",
    [
        PERSON, TREE, True, {"enum": [1, "a\\\"b", [1]]}, {"type": "array", "minItems": 3},
        {"type": "string", "minLength": 30},
        {"anyOf": [{"type": "null"}, TREE]}, {"type": "string", "format": "email", "minLength": 60},
        {"type": "array", "items": {"type": "string"}, "contains": {"const": "admin"}},
    ],
)  # fmt: skip
def test_an_example_is_valid(schema: Any) -> None:
    report = report_on(schema)
    assert report.example is not None and report.is_example_valid, report.example
    assert not report.warnings and not report.refusals


def test_what_multiplies_out_is_named_by_the_keyword_that_does() -> None:
    objects = [{"a": i, "b": f"{i}"} for i in range(2100)]
    (one,) = report_on({"properties": {"x": {"enum": objects}}}).refusals
    assert (one.pointer, one.keyword) == ("/properties/x", "enum")
    assert "list fewer objects" in one.remedy


def test_the_path_its_size_and_what_is_watched_are_told() -> None:
    report = report_on(PERSON)
    assert report.path == "fsm" and (report.num_states or 0) > 10 and report.num_bytes > 0
    assert report.watches == ["items that must not repeat"]
    tree = report_on(TREE)
    assert tree.path == "lazy" and "rules" in tree.reason
    assert tree.watches == ["keys that must not repeat"]


def test_every_refusal_is_told_with_its_place_and_a_remedy() -> None:
    report = report_on(REFUSED)
    assert report.path is None and report.example is None
    places = {(one.pointer, one.keyword) for one in report.refusals}
    assert places == {
        ("/properties/n", "multipleOf"), ("/properties/p", "pattern"), ("/properties/r", "$ref"),
        ("/properties/u", "uniqueItems"),
    }  # fmt: skip
    assert all("`lenient`" in one.remedy for one in report.refusals)
    remedies = {one.keyword: one.remedy for one in report.refusals}
    assert "minimum" in remedies["multipleOf"] and "bundle" in remedies["$ref"]


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 12345}, {"not": {"uniqueItems": True}}, {"pattern": "(a)\\1"},
        {"items": {"pattern": "(a)\\1"}}, {"$ref": "other.json"},
        {"uniqueItems": True, "contains": {}, "maxContains": 2},
    ],
)  # fmt: skip
def test_a_refusal_is_told_once(schema: Any) -> None:
    assert len(report_on(schema).refusals) == 1


def test_words_that_are_no_keywords_are_told_with_the_one_meant() -> None:
    schema = {
        "type": "object", "requird": ["a"], "x-order": 1, "title": "T", "$comment": "c",
        "properties": {
            "a": {"type": "array", "maxItem": 3, "items": {"min_length": 2, "unit": "m"}},
            "requird": {"anyOf": [{"enums": [1]}, {"nullable": True}]},
            "e": {"enum": [{"maxItem": 3}], "default": {"maxItem": 3}},
        },
    }  # fmt: skip
    report = report_on(schema)
    assert report.path is not None
    assert report.notes == [
        "/: requird is no keyword, and ignored; is `required` meant?",
        "/properties/a: maxItem is no keyword, and ignored; is `maxItems` meant?",
        "/properties/a/items: min_length is no keyword, and ignored; is `minLength` meant?",
        "/properties/a/items: unit is no keyword, and ignored",
        "/properties/requird/anyOf/0: enums is no keyword, and ignored; is `enum` meant?",
        "/properties/requird/anyOf/1: nullable is no keyword, and ignored; is `type` meant?",
    ]
    assert report_on({"minLength": "3", "maxLenght": 2}).notes  # of a refused one, too


def test_lenient_compiles_the_rest_with_warnings() -> None:
    report = report_on(REFUSED, is_lenient=True)
    assert report.path is not None and not report.refusals
    assert len(report.warnings) == 4 and all("is not enforced" in one for one in report.warnings)


def test_a_malformed_schema_is_told_as_such() -> None:
    (refusal,) = report_on({"type": "strin"}).refusals
    assert refusal.pointer is None and "type='strin'" in refusal.reason
    (refusal,) = report_on({"type": "string", "enum": [1]}).refusals
    assert "matches no document" in refusal.reason and "look for" in refusal.remedy


def test_parts_are_timed() -> None:
    report = check_schema(GrammarSpec("json_schema", json.dumps(TREE)), single_bytes())
    assert set(report.seconds) == {
        "compile", "vocabulary", "binding", "first mask", "example", "validation",
    }  # fmt: skip
    assert all(value >= 0 for value in report.seconds.values())
