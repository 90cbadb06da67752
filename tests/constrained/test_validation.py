"""Lenient schemas: what validation says of a finished document."""

from __future__ import annotations

import json

from stemma.constrained.validation import MAX_ERRORS, validation_errors

SCHEMA = json.dumps({"items": {"type": "integer"}, "uniqueItems": True})


def test_a_valid_document_has_no_errors() -> None:
    assert validation_errors(SCHEMA, "[1,2]") == ()


def test_an_error_names_the_place() -> None:
    (error,) = validation_errors(SCHEMA, '[1,"a"]')
    assert error.startswith("/1: ")
    assert validation_errors(SCHEMA, "[1,1]")


def test_what_is_not_json_is_an_error() -> None:
    assert validation_errors(SCHEMA, "[1,")
    assert validation_errors("true", "NaN")
    assert validation_errors("true", "[" * 100_000)


def test_formats_are_asserted() -> None:
    assert validation_errors('{"format":"date"}', '"2023-02-29"')


def test_remote_references_are_not_fetched() -> None:
    (error,) = validation_errors('{"$ref":"http://127.0.0.1:9/x.json"}', "1")
    assert "cannot be validated" in error


def test_errors_are_bounded() -> None:
    assert len(validation_errors(SCHEMA, json.dumps(["a"] * 100))) == MAX_ERRORS
