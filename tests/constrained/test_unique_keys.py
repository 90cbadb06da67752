"""Keys come once in an object, in whatever tokens and spelling."""

from __future__ import annotations

import json

import pytest
from grammars import allowed, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained import BoundGrammar, GrammarSpec, compile_grammar
from stemma.constrained.unique_keys import Scan, UniqueKeys

TOKENS = [*(bytes([i]) for i in range(256)), b'ab"', b'":', b',"a":', b'{"a":1,"a":', b'b":1}']
VOCABULARY = vocabulary_of(TOKENS)
FREE = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.fixture(scope="module")
def objects() -> BoundGrammar:
    return compile_grammar(GrammarSpec("json_object")).bind(VOCABULARY)


def follows(grammar: BoundGrammar, tokens: list[int]) -> bool:
    matcher = grammar.matcher()
    return all(t in allowed(matcher, VOCABULARY) and matcher.consume(t) for t in tokens)


def pairs_repeat(text: str) -> bool:
    repeated = []

    def check(pairs: list[tuple[str, object]]) -> None:
        keys = [key for key, _ in pairs]
        repeated.append(len(set(keys)) < len(keys))

    json.loads(text, object_pairs_hook=check)
    return any(repeated)


def documents() -> st.SearchStrategy[str]:
    keys = st.sampled_from(['"a"', '"ab"', '"b"', '"\\u0061"', '"\\\\"', '"é"', '"a\\"b"'])

    def wrapped(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        members = st.lists(st.builds("{}:{}".format, keys, values), max_size=4)
        return members.map(lambda m: "{" + ",".join(m) + "}") | st.lists(values, max_size=2).map(
            lambda v: "[" + ",".join(v) + "]"
        )

    leaves = st.sampled_from(["1", '"a"', '"{\\"a\\":1,"', "null"])
    return st.recursive(leaves, wrapped, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(documents())
def test_the_scan_sees_what_a_parser_sees(text: str) -> None:
    scan = Scan().after(text.encode())
    assert scan.repeats == pairs_repeat(text)
    assert scan.objects == () and scan.string is None


@settings(max_examples=40, deadline=None)
@given(documents().filter(lambda text: text.startswith("{") and "\\u" not in text))
def test_an_object_is_followed_unless_a_key_comes_twice(objects: BoundGrammar, text: str) -> None:
    assert follows(objects, list(text.encode())) == (not pairs_repeat(text))


def test_a_token_with_a_whole_key_is_taken_out(objects: BoundGrammar) -> None:
    once = [*b'{"a":1']
    assert follows(objects, [*b'{"b":1', TOKENS.index(b',"a":')])
    assert not follows(objects, [*once, TOKENS.index(b',"a":')])
    assert not follows(objects, [*b'{"ab":1,"', TOKENS.index(b'ab"')])
    assert follows(objects, [*b'{"ab":1,"a', TOKENS.index(b'b":1}')]) is False
    assert follows(objects, [*b'{"a":{"ab":1},"', TOKENS.index(b'ab"')])


def test_rollback_forgets_keys(objects: BoundGrammar) -> None:
    matcher = objects.matcher()
    for byte in b'{"a":1,"':
        assert matcher.consume(byte)
    matcher.rollback(len(b'"a":1,"'))
    for byte in b'"a':
        assert matcher.consume(byte)
    assert ord('"') in allowed(matcher, VOCABULARY)


def test_a_key_that_must_follow_may_come_twice() -> None:
    """No output is left without a token."""
    twice = compile_grammar(GrammarSpec("regex", r'\{"a":1,"a":2\}')).bind(VOCABULARY)
    assert follows(UniqueKeys(twice, VOCABULARY), [*b'{"a":1,"a":2}'])


def test_listed_keys_need_no_scan() -> None:
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    listed = {**closed, "properties": {"a": {"type": "integer"}}}
    assert not compile_grammar(GrammarSpec("json_schema", json.dumps(listed))).needs_unique_keys
    assert compile_grammar(GrammarSpec("json_schema", json.dumps(FREE))).needs_unique_keys
