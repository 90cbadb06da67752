"""Schemas of several documents, bundled into one."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_oracle import grammar_matches

from stemma.constrained.schema.bundling import bundled
from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.errors import UnsupportedSchema

DRAFT4 = "http://json-schema.org/draft-04/schema#"
DRAFT7 = "http://json-schema.org/draft-07/schema#"
ADDRESS = {"type": "object", "properties": {"zip": {"$ref": "zip.json"}}, "required": ["zip"]}
ZIP = {"type": "string", "pattern": "^[0-9]{5}$"}
REMOTE = {
    "http://x.test/address.json": ADDRESS,
    "http://x.test/zip.json": ZIP,
    "http://x.test/unused.json": {"type": "nonsense"},
}


@pytest.mark.parametrize(
    "dialect", [DRAFT4, DRAFT7, "https://json-schema.org/draft/2020-12/schema"]
)
def test_references_lead_to_bundled_documents_and_on_from_these(dialect: str) -> None:
    schema = {"$schema": dialect, "items": {"$ref": "http://x.test/address.json"}, "type": "array"}
    with pytest.raises(UnsupportedSchema, match="bundle"):
        schema_grammar(schema)
    whole = bundled(schema, REMOTE)
    assert "unused" not in str(whole)
    grammar = schema_grammar(whole).grammar
    assert grammar_matches(grammar, '[{"zip":"12345"}]')
    assert not grammar_matches(grammar, '[{"zip":"1234"}]')


def test_a_schema_that_needs_no_other_stays_as_it_is() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": ZIP}}
    assert bundled(schema, REMOTE) is schema
    assert bundled(True, REMOTE) is True


@pytest.mark.parametrize(
    "remote",
    [
        {"$id": "urn:x:own", "$defs": {"a": ZIP}, "$ref": "#/$defs/a"},  # another URI of its own
        {"$schema": DRAFT7, "definitions": {"a": ZIP}, "$ref": "#/definitions/a"},
        {"$schema": DRAFT4, "id": "http://x.test/other#", "allOf": [ZIP]},
    ],
)
def test_a_document_is_found_whatever_it_calls_itself(remote: dict[str, Any]) -> None:
    whole = bundled({"$ref": "http://x.test/r.json"}, {"http://x.test/r.json": remote})
    grammar = schema_grammar(whole).grammar
    assert grammar_matches(grammar, '"12345"')
    assert not grammar_matches(grammar, '"x"')


def test_a_base_uri_within_the_schema_counts() -> None:
    schema = {
        "$id": "http://x.test/a/b.json",
        "items": {"$id": "../c.json", "items": {"$ref": "zip.json#"}},
    }
    grammar = schema_grammar(bundled(schema, REMOTE)).grammar
    assert grammar_matches(grammar, '[["12345"]]')
    assert not grammar_matches(grammar, '[["1"]]')
