"""Other engines' grammars by the same verbs: what they take, and what they refuse by name."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canonical_json import canonical_text, key_order
from grammars import SINGLE_BYTES, vocabulary_of

from stemma.constrained import outlines_index
from stemma.constrained.backends import require_backend
from stemma.constrained.compiler import compile_grammar
from stemma.constrained.matcher import BoundGrammar
from stemma.constrained.serving.compiler_service import GrammarCompiler
from stemma.constrained.spec import Backend, GrammarSpec
from stemma.errors import InvalidGrammar, MissingDependency

SUITE = os.environ.get("STEMMA_SCHEMA_SUITE")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "kind": {"enum": ["a", "b"]},
        "of": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
}
SAID = ['{"name":"é"}', '{"name":"abc","kind":"b","of":[1,null]}']
UNSAID = [
    "", "{}", '{"name":""}', '{"name":"abcd"}', '{"name":"a","kind":"c"}', '{"name":"a","x":1}',
    '{"name":"a","of":[1,2,3]}',
]  # fmt: skip


def bound(backend: Backend, kind: str, source: object, **options: Any) -> BoundGrammar:
    text = source if isinstance(source, str) else json.dumps(source)
    spec = GrammarSpec(kind, text, backend=backend, **options)  # type: ignore[arg-type]
    return compile_grammar(spec).bind(SINGLE_BYTES)


def bytes_of(value: int) -> bytes:
    return bytes([value])


def matches(grammar: BoundGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
@pytest.mark.parametrize(
    ("kind", "source", "yes", "no"),
    [
        ("regex", "[a-c]{2}/x?", ["ab/", "cc/x"], ["", "a/", "ab/xx"]),
        ("choices", ["a", "ab", "b|c"], ["a", "b|c"], ["", "b", "abb"]),
        ("json_schema", PERSON, SAID, UNSAID),
    ],
)
def test_both_take_what_is_regular(
    backend: Backend, kind: str, source: object, yes: list[str], no: list[str]
) -> None:
    grammar = bound(backend, kind, source)
    assert [text for text in yes if not matches(grammar, text)] == []
    assert [text for text in no if matches(grammar, text)] == []


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_masks_are_the_tokens_that_are_taken(backend: Backend) -> None:
    longer = ["{", '{"', '"name"', '":"', "é", '"}', "ab", '"name":"']
    vocabulary = vocabulary_of([*map(bytes_of, range(256)), *(text.encode() for text in longer)])
    text = json.dumps(PERSON)
    grammar = compile_grammar(GrammarSpec("json_schema", text, backend=backend)).bind(vocabulary)
    matcher, mask = grammar.matcher(), np.zeros(vocabulary.num_words, np.uint32)
    for token_id in vocabulary.encode(SAID[0]):
        matcher.mask(mask)
        allowed = {i for i in range(vocabulary.vocab_size) if mask[i // 32] >> (i % 32) & 1}
        for other in range(vocabulary.vocab_size):
            fork = matcher.fork()
            assert fork.consume(other) == (other in allowed), other
        assert matcher.consume(token_id)
        matcher.rollback(1)
        before = mask.copy()
        matcher.mask(mask)
        assert (mask == before).all() and matcher.consume(token_id)
    assert matcher.is_accepting() and matcher.is_finished() and matcher.error() is None


@pytest.mark.parametrize(
    ("backend", "kind", "source", "options", "message"),
    [
        ("outlines", "ebnf", 'root ::= "a"', {}, "'outlines' has no ebnf"),
        ("outlines", "json_object", "", {}, "'outlines' has no json_object"),
        ("outlines", "structural_tag", "{}", {}, "'outlines' has no structural_tag"),
        ("llguidance", "structural_tag", "{}", {}, "'llguidance' has no structural_tag"),
        ("llguidance", "json_schema", {}, {"property_order": "any"}, "property_order: 'any'"),
        ("llguidance", "json_schema", {}, {"formats": "ignore"}, "formats: 'ignore'"),
        ("llguidance", "json_schema", False, {}, "no document"),
        ("llguidance", "json_schema", {"not": {"type": "null"}}, {}, "not"),
        ("llguidance", "ebnf", "root ::= (", {}, "ebnf"),
        ("llguidance", "regex", "(", {}, "regex"),
        ("outlines", "json_schema", {}, {}, "only beside one"),
        ("outlines", "json_schema", True, {}, "no schemas true"),
        ("outlines", "json_schema", {"type": "integer", "minimum": 2}, {}, "minimum cannot"),
        ("outlines", "json_schema", {"type": "string", "pattern": "a|b"}, {}, "pattern cannot"),
        ("outlines", "json_schema", {"type": "string", "format": "date"}, {}, "format cannot"),
        ("outlines", "json_schema", {"oneOf": [{}]}, {}, "oneOf cannot"),
        ("outlines", "json_schema", {"anyOf": [{"type": "null"}], "minLength": 2}, {}, "minLength"),
        ("outlines", "json_schema", {"const": 1, "type": "string"}, {}, "type cannot"),
        ("outlines", "json_schema", {"type": "array"}, {}, "needs items"),
        ("outlines", "json_schema", {"type": "object"}, {}, "needs properties"),
        ("outlines", "json_schema", {"type": ["object", "null"]}, {}, "none may be"),
        ("outlines", "json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}}, {},
         "follows"),
        ("outlines", "json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
         {}, "recursive"),
        ("outlines", "json_schema", {"type": "null"}, {"whitespace": "flexible"}, "whitespace"),
        ("outlines", "json_schema", {"type": "null"}, {"is_lenient": True}, "lenient"),
        ("outlines", "regex", "(", {}, "outlines"),
    ],
)  # fmt: skip
def test_what_a_backend_does_not_enforce_is_refused_by_name(
    backend: Backend, kind: str, source: object, options: Any, message: str
) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        bound(backend, kind, source, **options)


def test_llguidance_follows_rules_of_both_notations() -> None:
    assert matches(bound("llguidance", "ebnf", 'start: "a" start | "b"'), "aab")
    assert matches(bound("llguidance", "ebnf", 'root ::= "a" root | "b"'), "aab")
    assert matches(bound("llguidance", "json_object", ""), '{"a":[1,{}]}')
    lenient = GrammarSpec("json_schema", '{"not":{}}', is_lenient=True, backend="llguidance")
    assert compile_grammar(lenient).schema == '{"not":{}}'


@pytest.mark.skipif(SUITE is None, reason="STEMMA_SCHEMA_SUITE names no folder")
@pytest.mark.parametrize(("backend", "least"), [("llguidance", 0.5), ("outlines", 0.1)])
def test_no_invalid_instance_of_the_suite_is_accepted(backend: Backend, least: float) -> None:
    assert SUITE is not None
    num_groups = num_right = 0
    for path in sorted(Path(SUITE).glob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            num_groups += 1
            schema, order = group["schema"], key_order(group["schema"])
            if isinstance(schema, dict):
                schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
            try:
                grammar = bound(backend, "json_schema", schema)
            except InvalidGrammar:
                continue
            found = [
                (test["valid"], matches(grammar, canonical_text(test["data"], order)))
                for test in group["tests"]
            ]
            assert (False, True) not in found, group["description"]
            num_right += all(is_valid == is_accepted for is_valid, is_accepted in found)
    assert num_right >= least * num_groups, f"{num_right} of {num_groups}"


def test_a_backend_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importing = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "outlines_core":
            raise ImportError(name)
        return importing(name, package)

    outlines_index._outlines.cache_clear()
    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingDependency, match=r"pip install 'stemma-lm\[outlines\]'"):
        GrammarCompiler(lambda: SINGLE_BYTES, backend="outlines")
    require_backend("llguidance")
