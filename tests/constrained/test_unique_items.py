"""Arrays of unique items, in whatever tokens and spelling."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammars import allowed, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.compiler import Limits, compile_grammar
from stemma.constrained.item_places import ROOT, ItemPlace
from stemma.constrained.matcher import BoundGrammar, Matcher
from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.constrained.seen_items import ItemScan, canonical_item
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import Vocabulary
from stemma.errors import InvalidGrammar, UnsupportedSchema

BYTES = [bytes([i]) for i in range(256)]
PIECES = [
    b'","', b'",', b'"]', b'["', b'a"', b'a","a"', b'["a","a"', b"[1,1", b"1,", b"1,1", b",1",
    b"1]", b"},", b"},{", b'{"a":', b'":1', b"]]", b"],[", b"1],[1]", b"true", b"true,", b"ab",
    b'b"', b'"b', b'\\u0061"', b"12", b"12,", b"0,", b".0", b".0,", b'"a"', b'"a",', b'"a":1},',
    b":1}", b'"a"]}', b'": ', b', "', b'",\n', b"},\n", b" {", b"1 ", b" \t ", b"]\n", b":\n1 ",
]  # fmt: skip
VOCABULARY = vocabulary_of([*BYTES, *PIECES])
ANY = (ItemPlace(), ItemPlace(is_unique=True))


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


PAIR = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS = [
    unique({}),
    unique({"type": "string"}),
    unique({"type": "integer"}),
    unique({"type": "number", "minimum": 0}),
    unique({"type": "integer", "minimum": 0, "maximum": 12}, minItems=13),
    unique({"type": "string", "pattern": "^[ab]{1,3}$"}, minItems=12),
    unique({"type": "string", "maxLength": 1}),
    unique({"enum": [f"{a}{b}" for a in "abc" for b in "abc12"]}, minItems=15),
    unique({"enum": [1, 12, 123, "1", "12", True, "true", None, 0, 10, 100]}, minItems=11),
    unique(PAIR, minItems=6),
    unique(unique({"enum": [*range(10)]}, maxItems=2), minItems=3),
    unique({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
            "additionalProperties": False}, minItems=2),
    unique({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 11},
            "maxItems": 1}, minItems=12),
    unique({"type": "integer"}, prefixItems=[{"type": "number", "minimum": 0, "maximum": 1}]),
    {"type": "object", "properties": {"u": unique({"type": "integer"}), "l": {"items": {}}},
     "required": ["u", "l"]},
    {"additionalProperties": unique({"type": "string"}), "type": "object"},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "boolean"}],
     "uniqueItems": True, "minItems": 3},
    unique({"type": "integer"}, contains={"const": 1}),
    {"$defs": {"tree": {"type": "object", "properties": {
        "n": {"type": "integer"}, "kids": unique({"$ref": "#/$defs/tree"})},
        "required": ["n"], "additionalProperties": False}}, "$ref": "#/$defs/tree"},
]  # fmt: skip


LIMITS = Limits()


def bound(schema: Any, limits: Limits = LIMITS, **options: Any) -> BoundGrammar:
    return compile_grammar(GrammarSpec("json_schema", json.dumps(schema), **options), limits).bind(
        VOCABULARY
    )


def follows(grammar: BoundGrammar, text: bytes) -> bool:
    """Whether a text is accepted byte by byte."""
    matcher = grammar.matcher()
    taken = all(b in allowed(matcher, VOCABULARY) and matcher.consume(b) for b in text)
    return taken and matcher.is_accepting()


def random_tokens(matcher: Matcher, rng: random.Random, most: int) -> list[int] | None:
    """A whole text; it ends as soon as it may after so many tokens. None: it does not."""
    taken: list[int] = []
    closing = [ord(c) for c in ']}"']
    while not matcher.is_finished():
        if matcher.is_accepting() and (len(taken) > most or rng.random() < 0.3):
            break
        if len(taken) > 4 * most:
            return None
        tokens = allowed(matcher, VOCABULARY)
        assert tokens, (matcher.error(), written(taken))
        first = [t for t in closing if t in tokens] if len(taken) > most else []
        pieces = [t for t in tokens if t >= 256]
        plain = [t for t in tokens if t < 128] or list(tokens)
        token = rng.choice(first or (pieces if pieces and rng.random() < 0.4 else plain))
        assert matcher.consume(token), (written(taken), VOCABULARY.token_bytes[token])
        taken.append(token)
    return taken


def written(tokens: list[int]) -> bytes:
    return b"".join(VOCABULARY.token_bytes[t] for t in tokens)


@pytest.mark.parametrize(
    ("is_regular", "whitespace"), [(True, "compact"), (False, "compact"), (True, "flexible")]
)
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_random_outputs_are_valid_and_never_stuck(
    schema: Any, is_regular: bool, whitespace: str
) -> None:
    limits = Limits() if is_regular else Limits(max_states=3)
    grammar = bound(schema, limits, whitespace=whitespace)
    validator = jsonschema.Draft202012Validator(schema)
    num_written = 0
    for seed in range(8):
        tokens = random_tokens(grammar.matcher(), random.Random(seed), 30)
        if tokens is None:
            continue
        num_written += 1
        text = written(tokens)
        if b"e" in text.lower().replace(b"true", b"").replace(b"false", b""):
            continue  # an exponent may be beyond the validator
        assert validator.is_valid(json.loads(text)), text
    assert num_written


@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_the_mask_is_what_consume_takes(schema: Any, whitespace: str) -> None:
    matcher = bound(schema, whitespace=whitespace).matcher()
    rng = random.Random(7)
    for _ in range(25):
        tokens = allowed(matcher, VOCABULARY)
        for token in range(VOCABULARY.vocab_size):
            is_taken = matcher.consume(token)
            assert is_taken == (token in tokens), VOCABULARY.token_bytes[token]
            if is_taken:
                matcher.rollback(1)
        if not tokens:
            break
        pieces = [t for t in tokens if t >= 256] or list(tokens)
        matcher.consume(rng.choice(pieces))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([1.0, 0.5, "a", "b", "1", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUES, max_size=4))
def test_equality_is_that_of_json_schema(items: list[Any]) -> None:
    is_unique = jsonschema.Draft202012Validator({"uniqueItems": True}).is_valid(items)
    for text in (json.dumps(items), json.dumps(items, indent=1)):
        assert ItemScan(ANY, bytearray()).after(text.encode()).repeats != is_unique
        scan = ItemScan(ANY, bytearray())
        for byte in text.encode():
            scan = scan.after(bytes([byte]))
            if scan.repeats:
                break
        assert scan.repeats != is_unique


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0", "0E12345678901234567890"),
        ("1e400", "1e4000"),
        ("1", "1.0"),
        ('"a"', '"\\u0061"'),
        ('{"a":1,"b":[2]}', '{"b":[2.0],"a":1}'),
        ("100", "1E2"),
    ],
)
def test_equal_values_are_one_item_however_they_are_written(one: str, other: str) -> None:
    grammar = bound(unique({}))
    assert canonical_item(one) == canonical_item(other)
    assert not follows(grammar, f"[{one},{other}]".encode())
    assert follows(grammar, f"[{one},[{other}]]".encode())


def test_an_item_that_only_a_seen_one_could_become_is_not_begun() -> None:
    matcher = bound(unique({"type": "string", "maxLength": 2})).matcher()
    for byte in b'["ab","a':
        assert matcher.consume(byte)
    assert ord("b") not in allowed(matcher, VOCABULARY)
    assert ord("c") in allowed(matcher, VOCABULARY)


def test_a_comma_after_the_last_value_is_refused() -> None:
    matcher = bound(unique({"type": "integer", "minimum": 1, "maximum": 9})).matcher()
    for byte in b"[1,2,3,4,5,6,7,8,9":
        assert matcher.consume(byte)
    assert allowed(matcher, VOCABULARY) == {ord("]")}


@pytest.mark.parametrize(
    ("whitespace", "before"),
    [("compact", b"8,3,2,5,0,9,7,12,11,null,10,6,4"), ("flexible", b"8,3,2,5,0,9,7,12,11,10,6,4")],
)
def test_the_end_of_a_number_is_one_item_whatever_follows_it(
    whitespace: str, before: bytes
) -> None:
    """`1,`, `1]` and `1 ` are lost together once 1 has come, and with them all that `1` begins."""
    items = {"anyOf": [{"enum": [[], None]}, {"type": "integer", "minimum": 0, "maximum": 12}]}
    matcher = bound(unique(items, minItems=12), whitespace=whitespace).matcher()
    for byte in b"[%s,1," % before:
        assert byte in allowed(matcher, VOCABULARY)
        assert matcher.consume(byte)
    assert ord("1") not in allowed(matcher, VOCABULARY)
    assert ord("[") in allowed(matcher, VOCABULARY)


def test_rollback_and_fork_forget_and_keep_items() -> None:
    matcher = bound(unique({"type": "integer"})).matcher()
    for byte in b"[1,2,":
        assert matcher.consume(byte)
    other = matcher.fork()
    matcher.rollback(2)
    assert all(map(matcher.consume, b"3,2"))
    assert ord("]") in allowed(matcher, VOCABULARY)
    assert other.consume(ord("2"))
    assert ord("]") not in allowed(other, VOCABULARY)


def test_more_items_than_there_are_values_match_no_document() -> None:
    with pytest.raises(InvalidGrammar, match="matches no document"):
        schema_grammar(unique({"enum": [*range(20)]}, minItems=21))
    assert schema_grammar(unique({"enum": [*range(20)]}, minItems=20)).item_places is not None


def test_what_a_path_cannot_tell_is_refused_to_all_branches_and_lenient_to_none() -> None:
    schema = {"anyOf": [unique({"type": "integer"}), {"type": "array", "maxItems": 3}]}
    strict, lenient = bound(schema), bound(schema, is_lenient=True)
    assert "holds in every branch" in strict.warnings[0]
    assert not follows(strict, b"[1,1]")
    assert "is not enforced" in lenient.warnings[0]
    assert follows(lenient, b"[1,1]")


def test_few_values_need_no_scan() -> None:
    assert schema_grammar(unique({"enum": [1, 2, 3]})).item_places is None
    places = schema_grammar(unique({"type": "string"})).item_places
    assert places is not None and places[ROOT].is_unique


def test_items_are_not_watched_within_tags() -> None:
    tags = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "end": "</a>", "content": {
            "type": "json_schema", "json_schema": unique({"type": "string"})}},
    }  # fmt: skip
    with pytest.raises(UnsupportedSchema, match="uniqueItems"):
        compile_grammar(GrammarSpec("structural_tag", json.dumps(tags)))


def test_a_language_that_cannot_go_on_is_an_error_of_its_output() -> None:
    """Where a vocabulary cannot look ahead, an output may come to an end without an item left."""
    vocabulary = Vocabulary([b"[", b"]", b",", b'"', b"a", b"b"], lambda text: [], 6)
    schema = unique({"type": "string", "pattern": "^(a|b|aa|ab|ba|bb|[ab]{3,9})$"}, minItems=2)
    matcher = (
        compile_grammar(GrammarSpec("json_schema", json.dumps(schema))).bind(vocabulary).matcher()
    )
    for token in (0, 3, *[4] * 9, 3, 2, 3, *[4] * 9):
        assert matcher.consume(token)
    mask = np.empty(1, np.uint32)
    matcher.mask(mask)
    assert not mask.any()
    assert "uniqueItems" in (matcher.error() or "")
