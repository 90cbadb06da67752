"""Keys come once in an object, in whatever tokens and spelling."""

from __future__ import annotations

import json
import random

import pytest
from grammars import allowed, greedy_encode, vocabulary_of, written
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.compiler import Limits, compile_grammar
from stemma.constrained.matcher import BoundGrammar
from stemma.constrained.seen_keys import Scan
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.unique_keys import UniqueKeys
from stemma.constrained.vocabulary import Vocabulary

TOKENS = [*(bytes([i]) for i in range(256)), b'ab"', b'":', b',"a":', b'{"a":1,"a":', b'b":1}']
VOCABULARY = vocabulary_of(TOKENS)
FREE = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.fixture(scope="module")
def objects() -> BoundGrammar:
    return compile_grammar(GrammarSpec("json_object")).bind(VOCABULARY)


def follows(grammar: BoundGrammar, tokens: list[int], vocabulary: Vocabulary = VOCABULARY) -> bool:
    matcher = grammar.matcher()
    return all(t in allowed(matcher, vocabulary) and matcher.consume(t) for t in tokens)


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


@pytest.mark.parametrize("begun", [b"", b"a", b'a":2,"b'])
@pytest.mark.parametrize("is_regular", [True, False])
def test_a_token_that_ends_a_key_and_repeats_it_is_taken_out(
    begun: bytes, is_regular: bool
) -> None:
    """One token: the open key's end, its value, and the same key again."""
    key = begun.rpartition(b'"')[2]
    token = b'":1,"' + key + b'"'
    vocabulary = vocabulary_of([*(bytes([i]) for i in range(256)), token, b'":1,"c"'])
    grammar = nested_objects("[a-c]*", 0, is_regular, vocabulary)
    for last, is_allowed in ((256, False), (257, True)):
        assert follows(grammar, [*b'{"', *begun, last], vocabulary) == is_allowed


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
    assert follows(UniqueKeys(twice, VOCABULARY, looks_ahead=True), [*b'{"a":1,"a":2}'])


def test_listed_keys_need_no_scan() -> None:
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    listed = {**closed, "properties": {"a": {"type": "integer"}}}
    assert not compile_grammar(GrammarSpec("json_schema", json.dumps(listed))).needs_unique_keys
    assert compile_grammar(GrammarSpec("json_schema", json.dumps(FREE))).needs_unique_keys


PIECES = ["a", "b", "c", '"', '":', "1", ",", "{", "}", '"a', 'b"', ',"', ' "', '":1,"']
LANGUAGES = {  # of keys, to their words, or some
    "[a-c]": ["a", "b", "c"],
    "[ab]{1,2}": ["a", "b", "aa", "ab", "ba", "bb"],
    "a(b(c)?)?": ["a", "ab", "abc"],
    "a(bc|cb)(a)?": ["abc", "acb", "abca", "acba"],
    "b|ca*": ["b", "c", "ca", "caa", "caaa", "caaaa", "caaaaa", "caaaaaa"],
    "[a-c]*": ["", "a", "bb", "cab", "abc", "abca", "aa", "bbb"],
}


def nested_objects(keys: str, least: int, is_regular: bool, vocabulary: Vocabulary) -> UniqueKeys:
    """Objects of such keys, of as many at least, with objects and arrays as values."""

    def members(value: str, least: int) -> str:
        member = f'"({keys})":{value}'
        more = f"({member}(, ?{member}){{{max(0, least - 1)},}})"
        return rf"\{{{more if least else more + '?'}\}}"

    value = rf'([1-9]{{1,2}}|"[a,]"|\[({members("1", 0)}(,1)?)?\]|{members("1", 0)})'
    spec = GrammarSpec("regex", members(value, least))
    limits = Limits() if is_regular else Limits(max_states=3)
    bound = compile_grammar(spec, limits).bind(vocabulary)
    assert bound.path == ("fsm" if is_regular else "pushdown")
    return UniqueKeys(bound, vocabulary, looks_ahead=True)


@st.composite
def key_grammars(draw: st.DrawFn) -> tuple[UniqueKeys, Vocabulary, str, int]:
    """With the keys' language, and how many of them an object has at least."""
    keys = draw(st.sampled_from(sorted(LANGUAGES)))
    least, is_regular = draw(st.integers(0, len(LANGUAGES[keys]))), draw(st.booleans())
    pieces = st.lists(st.sampled_from(PIECES), min_size=2, max_size=5).map("".join)
    long = [text.encode() for text in draw(st.lists(pieces, max_size=40))]
    vocabulary = vocabulary_of([*(bytes([i]) for i in range(256)), *long])
    return nested_objects(keys, least, is_regular, vocabulary), vocabulary, keys, least


@settings(max_examples=60, deadline=None)
@given(key_grammars(), st.randoms(use_true_random=False))
def test_no_walk_under_the_masks_repeats_a_key(
    made: tuple[UniqueKeys, Vocabulary, str, int], picks: random.Random
) -> None:
    grammar, vocabulary, *_ = made
    matcher = grammar.matcher()
    text, masks = b"", [allowed(matcher, vocabulary)]
    while not matcher.is_finished() and len(masks) < 60:
        assert masks[-1]
        forced = matcher.forced_tokens()
        assert not forced or forced[0] in masks[-1]
        for token in picks.sample(range(vocabulary.vocab_size), 10):
            assert matcher.consume(token) == (token in masks[-1])
            if token in masks[-1]:
                matcher.rollback(1)
        closing = [t for t in masks[-1] if vocabulary.token_bytes[t] in (b"}", b'"')]
        likely = closing if closing and picks.random() < 0.3 else sorted(masks[-1])
        token = picks.choice(likely)
        assert matcher.consume(token)
        text += vocabulary.token_bytes[token]
        masks.append(allowed(matcher, vocabulary))
    assert not Scan().after(text).repeats
    assert not matcher.is_finished() or not pairs_repeat(text.decode())
    back = picks.randint(0, len(masks) - 1)
    matcher.rollback(back)
    assert allowed(matcher, vocabulary) == masks[len(masks) - 1 - back]


@settings(max_examples=60, deadline=None)
@given(key_grammars(), st.randoms(use_true_random=False))
def test_every_object_of_different_keys_is_followed(
    made: tuple[UniqueKeys, Vocabulary, str, int], picks: random.Random
) -> None:
    grammar, vocabulary, keys, least = made
    words = LANGUAGES[keys]

    def members(value: str, least: int = 0) -> str:
        chosen = picks.sample(words, picks.randint(least, len(words)))
        return "{" + ",".join(f'"{word}":{value}' for word in chosen) + "}"

    for _ in range(5):
        value = picks.choice(["1", '"a"', '","', members("1"), f"[{members('1')},1]"])
        tokens = greedy_encode(vocabulary.token_bytes, members(value, least))
        plain = grammar._inner.matcher()
        assert all(map(plain.consume, tokens)), "the test's own text is at fault"
        assert follows(grammar, tokens, vocabulary)


@pytest.mark.parametrize("limits", [Limits(), Limits(max_states=3)])
@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ({"pattern": "^[a-z]$"}, "abcdefghijklmnopqrstuvwxyz"),
        ({"pattern": "^[A-E]{2}$"}, [a + b for a in "ABCDE" for b in "ABCDE"]),
        ({"pattern": "^[01]{2,6}$", "maxLength": 4}, None),
        ({"format": "date"}, None),
    ],
)
def test_no_key_is_begun_that_can_only_be_repeated(
    names: dict[str, object], keys: list[str] | None, limits: Limits
) -> None:
    schema = {"type": "object", "minProperties": 3, "propertyNames": names,
              "additionalProperties": {"const": 1}}  # fmt: skip
    compiled = compile_grammar(GrammarSpec("json_schema", json.dumps(schema)), limits)
    grammar = compiled.bind(VOCABULARY)
    ends = {i for i, token in enumerate(TOKENS) if b"}" in token}
    for seed in range(10):
        matcher, picks, text = grammar.matcher(), random.Random(seed), b""
        while not matcher.is_finished() and len(text) < 600:
            choices = sorted(allowed(matcher, VOCABULARY) - ends) or [ord("}")]
            token = picks.choice(choices)
            assert matcher.consume(token)
            text += VOCABULARY.token_bytes[token]
        assert not Scan().after(text).repeats
        if keys is not None:
            assert sorted(json.loads(text)) == sorted(keys)  # all of them, then the end


@pytest.mark.parametrize("is_regular", [False, True])
def test_a_string_that_begins_with_a_comma_hides_no_comma_behind_it(is_regular: bool) -> None:
    """In one token: the value `,`, its quote, and a comma after which every key has been seen."""
    vocabulary = vocabulary_of([*(bytes([i]) for i in range(256)), b',",'])
    matcher = nested_objects("[a-c]", 0, is_regular, vocabulary).matcher()
    for byte in b'{"a":1,"b":1,"c":"':
        assert matcher.consume(byte)
    assert allowed(matcher, vocabulary) == {ord("a"), ord(",")}
    assert not matcher.consume(vocabulary.token_bytes.index(b',",'))


def test_keys_that_are_owed_beyond_all_that_there_are_may_come_twice() -> None:
    grammar = nested_objects("[a-c]", 4, True, VOCABULARY)
    matcher = grammar.matcher()
    for wanted in b'{"a":1,"b":1,"c":1, "':
        assert matcher.consume(wanted)
    assert {ord("a"), ord("b"), ord("c")} <= allowed(matcher, VOCABULARY)


def test_a_key_that_is_owed_is_begun_as_a_new_one() -> None:
    """While the object may not close, a token with the comma and a used-up beginning is out."""
    vocabulary = vocabulary_of([*(bytes([i]) for i in range(256)), b',"b'])
    grammar = nested_objects("[ab]{1,2}", 6, True, vocabulary)
    once = [*b'{"b":1,"ba":1,"bb":1']
    assert follows(grammar, [*once, *b',"a"'], vocabulary)
    assert not follows(grammar, [*once, 256], vocabulary)


def test_consuming_agrees_with_the_mask(objects: BoundGrammar) -> None:
    matcher = objects.matcher()
    assert all(matcher.consume(byte) for byte in b'{"a":1,"a')
    assert not matcher.consume(ord('"'))
    assert matcher.consume(ord("b")) and matcher.consume(ord('"'))


def test_a_token_that_contains_a_key_twice_is_taken_out(objects: BoundGrammar) -> None:
    assert TOKENS.index(b'{"a":1,"a":') not in allowed(objects.matcher(), VOCABULARY)


def test_a_forced_run_ends_before_a_key_that_came() -> None:
    text = r'\{"[ab]":1,"a":2\}'
    bound = compile_grammar(GrammarSpec("regex", text)).bind(VOCABULARY)
    grammar = UniqueKeys(bound, VOCABULARY, looks_ahead=True)
    for key, forced in ((b"a", b'":1'), (b"b", b'":1,"a":2}')):
        matcher = grammar.matcher()
        assert all(matcher.consume(byte) for byte in b'{"%s' % key)
        assert written(VOCABULARY, matcher.forced_tokens()) == forced


def test_a_fork_has_seen_the_keys_of_what_it_was_forked_from_and_no_others(
    objects: BoundGrammar,
) -> None:
    first = objects.matcher()
    assert all(first.consume(token) for token in b'{"a":1,')
    second = first.fork()
    assert all(first.consume(token) for token in b'"b":1,"')
    assert all(second.consume(token) for token in b'"c":1,"')
    assert not first.consume(TOKENS.index(b'b":1}')) and second.consume(TOKENS.index(b'b":1}'))


@pytest.mark.parametrize(
    ("schema", "looks_ahead"),
    [
        ({"patternProperties": {"^a": {"type": "integer"}}}, False),  # others are free
        ({"patternProperties": {"^a+$": True}, "additionalProperties": {"type": "null"}}, False),
        ({"patternProperties": {"^a": True}, "additionalProperties": False}, True),
        ({"propertyNames": {"pattern": "^[a-z]$"}}, True),
        ({"propertyNames": {"maxLength": 3}}, True),
        ({"patternProperties": {"^a": False}}, True),
    ],
)
def test_it_looks_ahead_where_some_keys_are_forbidden(
    schema: dict[str, object], looks_ahead: bool
) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "object", **schema}))
    compiled = compile_grammar(spec)
    assert compiled.needs_unique_keys and compiled.has_patterned_keys == looks_ahead


def test_a_key_is_remembered_though_its_token_was_consumed_without_a_mask() -> None:
    """The mask that decides on a token reads others, which write keys of their own."""
    tokens = [*(bytes([i]) for i in range(256)), b'c":1,"a', b'd":1,"']
    vocabulary = vocabulary_of(tokens)
    schema = {"type": "object", "patternProperties": {"^[a-d]{1,4}$": {"type": "integer"}},
              "additionalProperties": False}  # fmt: skip
    grammar = compile_grammar(GrammarSpec("json_schema", json.dumps(schema))).bind(vocabulary)
    matcher = grammar.matcher()
    for token in [*b'{"a":1,"', tokens.index(b'c":1,"a'), *b'b":1,"']:
        assert matcher.consume(token)
    assert matcher.consume(ord("d"))
    assert ord('"') in allowed(matcher, vocabulary)
    matcher.rollback(1)
    assert matcher.consume(ord("c"))
    assert ord('"') not in allowed(matcher, vocabulary)
