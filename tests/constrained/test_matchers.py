"""The verbs of a matcher, on both paths: what holds for every grammar."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from grammars import (
    SINGLE_BYTES,
    alive_tokens,
    allowed,
    expressions,
    json_grammars,
    random_walk,
    vocabularies,
    vocabulary_of,
    written,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stemma.constrained import fsm
from stemma.constrained.compiled_grammar import CompiledGrammar
from stemma.constrained.compiler import compile_grammar
from stemma.constrained.fsm import FsmGrammar, FsmMatcher
from stemma.constrained.grammar import (
    Alt,
    Concat,
    Expression,
    Grammar,
    Literal,
    Ref,
    Repeat,
    concat,
)
from stemma.constrained.lark import json_to_lark, regular_to_lark
from stemma.constrained.lazy import LIMIT_REACHED, LazyAutomaton
from stemma.constrained.native.bindings import library
from stemma.constrained.pushdown import PushdownGrammar
from stemma.constrained.regular.build import build_dfa
from stemma.constrained.regular.dfa import Dfa
from stemma.constrained.regular.flat_grammar import flat_grammar
from stemma.constrained.regular.limits import MAX_STATES, Budget
from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import Vocabulary
from stemma.errors import InvalidGrammar

seeds = st.integers(0, 2**32)
needs_native = pytest.mark.skipif(library() is None, reason="needs the compiled code")
NESTED = Grammar({"root": concat(Literal("["), Alt((Literal("a"), Ref("root"))), Literal("]"))})
COUNTED = [
    schema_grammar(schema).grammar
    for schema in (
        {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 9000},
        {"type": "object", "additionalProperties": {"not": {"const": 1}}, "minProperties": 2},
        {"type": "string", "pattern": "^(a|b)*c", "maxLength": 30, "not": {"pattern": "aab"}},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
    )
]


def dfa_of(grammar: Grammar) -> Dfa:
    dfa = build_dfa(grammar)
    assume(not dfa.is_empty)
    return dfa


@settings(max_examples=40, deadline=None)
@given(expressions(), vocabularies(), seeds)
def test_the_mask_is_what_consume_allows(
    expression: Expression, vocabulary: Vocabulary, seed: int
) -> None:
    grammar = FsmGrammar(dfa_of(Grammar.of(expression)), vocabulary)
    matcher = grammar.matcher()
    random_walk(matcher, vocabulary, seed, max_tokens=3)
    mask = allowed(matcher, vocabulary)
    for token in range(vocabulary.vocab_size):
        taken = matcher.consume(token)
        assert taken == (token in mask)
        if taken:
            matcher.rollback(1)


@settings(max_examples=40, deadline=None)
@given(expressions(), vocabularies(), seeds)
def test_a_walk_through_masks_is_a_prefix_of_the_language_and_ends_in_it(
    expression: Expression, vocabulary: Vocabulary, seed: int
) -> None:
    dfa = dfa_of(Grammar.of(expression))
    matcher = FsmGrammar(dfa, vocabulary).matcher()
    data = written(vocabulary, random_walk(matcher, vocabulary, seed))
    assert dfa.walk(dfa.start, data) != 0
    assert matcher.is_accepting() == dfa.matches(data)
    if matcher.is_finished():
        assert matcher.is_accepting() and not allowed(matcher, vocabulary)


def test_an_output_is_finished_where_nothing_that_its_grammar_goes_on_with_has_a_text() -> None:
    matcher = PushdownGrammar("start: T\nT: /a/ (/b/ & /c/)*", SINGLE_BYTES).matcher()
    assert not matcher.is_finished() and matcher.consume(ord("a"))
    assert matcher.is_accepting() and not allowed(matcher, SINGLE_BYTES) and matcher.is_finished()


@settings(max_examples=25, deadline=None)
@given(expressions(), vocabularies(), seeds)
def test_both_paths_agree_on_a_regular_language(
    expression: Expression, vocabulary: Vocabulary, seed: int
) -> None:
    grammar = Grammar.of(expression)
    dfa = dfa_of(grammar)
    agree(dfa, regular_to_lark(grammar), vocabulary, seed)


@settings(max_examples=25, deadline=None)
@given(json_grammars(), vocabularies(), seeds)
def test_both_paths_agree_on_a_language_of_json(
    grammar: Grammar, vocabulary: Vocabulary, seed: int
) -> None:
    agree(dfa_of(grammar), json_to_lark(grammar), vocabulary, seed)


def lazy_of(grammar: Grammar) -> LazyAutomaton:
    return LazyAutomaton(flat_grammar(grammar), Budget.of(MAX_STATES, None))


@needs_native
@settings(max_examples=100, deadline=None)
@given(st.one_of(expressions().map(Grammar.of), json_grammars()), vocabularies(), seeds)
def test_states_made_on_the_way_allow_what_a_whole_automaton_does(
    grammar: Grammar, vocabulary: Vocabulary, seed: int
) -> None:
    dfa = dfa_of(grammar)
    whole = FsmGrammar(dfa, vocabulary).matcher()
    lazy = FsmGrammar(lazy_of(grammar), vocabulary).matcher()
    tokens = random_walk(whole, vocabulary, seed)
    whole.rollback(len(tokens))
    for token in [*tokens, None]:
        assert observed(lazy, vocabulary) == observed(whole, vocabulary)
        assert lazy.error() is None
        if token is not None:
            assert whole.consume(token) and lazy.consume(token)


@needs_native
@settings(max_examples=40, deadline=None)
@given(st.one_of(expressions().map(Grammar.of), json_grammars()))
def test_a_lazy_automaton_is_empty_where_a_whole_one_is(grammar: Grammar) -> None:
    assert lazy_of(grammar).is_empty == build_dfa(grammar).is_empty


@needs_native
@settings(max_examples=25, deadline=None)
@given(vocabularies(), seeds)
def test_a_recursive_grammar_is_matched_as_by_the_parser(vocabulary: Vocabulary, seed: int) -> None:
    for grammar in (NESTED, schema_grammar({"type": "object"}).grammar):
        lazy = FsmGrammar(lazy_of(grammar), vocabulary).matcher()
        parsed = PushdownGrammar(json_to_lark(grammar), vocabulary).matcher()
        tokens = random_walk(lazy, vocabulary, seed, max_tokens=20)
        lazy.rollback(len(tokens))
        for token in [*tokens, None]:
            assert allowed(lazy, vocabulary) == allowed(parsed, vocabulary)
            assert lazy.is_accepting() == parsed.is_accepting()
            if token is not None:
                assert lazy.consume(token) and parsed.consume(token)


@needs_native
def test_ways_to_read_a_text_do_not_multiply_with_its_depth() -> None:
    """Two rules for the same texts, within each other: 2^40 readings, but few states."""
    either = Alt((Ref("a"), Ref("b")))
    bracketed = concat(Literal("["), either, Literal("]"))
    rules = {"root": either, "a": Alt((bracketed, Literal("x"))),
             "b": Alt((Concat((Literal("["), either, Literal("]"))), Literal("x")))}  # fmt: skip
    automaton = lazy_of(Grammar(rules))
    matcher = FsmGrammar(automaton, SINGLE_BYTES).matcher()
    for byte in b"[" * 40 + b"x" + b"]" * 40:
        assert matcher.consume(byte)
    assert matcher.is_finished() and automaton.num_states < 200


@needs_native
def test_alternatives_do_not_multiply_with_the_depth_of_a_recursive_union() -> None:
    """At each level 600 kinds of arrays, each of which may be within any of the last level's."""
    kinds = {f"k{i}": concat(Literal("["), Repeat(Ref("any"), 0, i), Literal("]"))
             for i in range(1, 601)}  # fmt: skip
    grammar = Grammar({"root": Ref("any"), "any": Alt(tuple(map(Ref, kinds))), **kinds})
    matcher = FsmGrammar(lazy_of(grammar), SINGLE_BYTES).matcher()
    for byte in b"[[[][[]]]":
        assert matcher.consume(byte)
        assert matcher.error() is None
    assert allowed(matcher, SINGLE_BYTES) == {ord("["), ord("]")}


@needs_native
def test_an_endless_expansion_is_an_error_of_the_grammar() -> None:
    endless = Grammar({"root": Alt((concat(Ref("root"), Literal("a")), Literal("b")))})
    automaton = lazy_of(endless)
    assert automaton.step(automaton.start, b"b") == 0 and automaton.has_failed


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    st.one_of(expressions().map(Grammar.of), json_grammars(), st.sampled_from(COUNTED)),
    vocabularies(),
    seeds,
    st.data(),
)
def test_an_output_goes_on_where_states_are_forgotten(
    grammar: Grammar, vocabulary: Vocabulary, seed: int, data: st.DataObject
) -> None:
    """Also where it is rolled back beyond what was kept, and for forks."""
    assume(not lazy_of(grammar).is_empty)
    truth = FsmGrammar(lazy_of(grammar), vocabulary).matcher()
    bound = FsmGrammar(lazy_of(grammar), vocabulary)
    matchers = [bound.matcher()]
    tokens = random_walk(truth, vocabulary, seed, max_tokens=30)
    truth.rollback(len(tokens))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fsm, "KEPT_STATES", 2)
        for num_taken, token in enumerate([*tokens, None]):
            if data.draw(st.integers(0, 3)) == 0:
                bound.make_room()
                back = data.draw(st.integers(0, num_taken))
                matchers[0].rollback(back)
                assert all(map(matchers[0].consume, tokens[num_taken - back : num_taken]))
                matchers.append(matchers[-1].fork())
            for matcher in matchers:
                assert observed(matcher, vocabulary) == observed(truth, vocabulary)
                assert matcher.error() is None
                assert token is None or matcher.consume(token)
            assert token is None or truth.consume(token)


@needs_native
def test_an_output_of_any_length_is_followed_under_counts() -> None:
    """100,000 characters, each of which is states of its own."""
    schema = {
        "type": "array",
        "items": {"type": "string", "minLength": 3000, "maxLength": 7000},
        "minItems": 20,
        "maxItems": 8000,
    }
    compiled = compile_grammar(GrammarSpec("json_schema", json.dumps(schema)))
    vocabulary = vocabulary_of([b"a" * 50, *(bytes([byte]) for byte in range(256))])
    bound = compiled.bind(vocabulary)
    assert compiled.path == "lazy" and isinstance(bound, FsmGrammar)
    matcher, modest = bound.matcher(), bound.matcher()
    take, num_states = [0, *(1 + byte for byte in range(256))], []
    assert matcher.consume(take[1 + ord("[")])
    assert all(map(modest.consume, (take[1 + byte] for byte in b'["a')))
    rng = random.Random(5)
    for num_items in range(1, 21):
        length = rng.choice((3000, 4999, 6990, 7000))
        assert matcher.consume(take[1 + ord('"')])
        for num in range(0, length // 50 * 50, 50):
            mask = allowed(matcher, vocabulary)
            assert (take[1 + ord('"')] in mask) == (num >= 3000)
            assert 0 in mask and matcher.consume(0)
        for num in range(length // 50 * 50, length):
            assert 0 not in allowed(matcher, vocabulary) or num + 50 <= 7000
            assert matcher.consume(take[1 + ord("b")])
        ends = allowed(matcher, vocabulary)
        assert take[1 + ord('"')] in ends and (take[1 + ord("c")] in ends) == (length < 7000)
        assert matcher.consume(take[1 + ord('"')])
        ends = allowed(matcher, vocabulary)
        assert ends == {take[1 + ord(",")], *([take[1 + ord("]")]] if num_items == 20 else [])}
        num_states.append(bound.automaton.num_states)
        assert bound.num_bytes < 330 * 2**20
        assert num_items == 20 or matcher.consume(take[1 + ord(",")])
    assert min(after - before for before, after in itertools.pairwise(num_states)) < 0
    assert matcher.consume(take[1 + ord("]")]) and matcher.is_finished()
    assert 0 in allowed(modest, vocabulary) and modest.error() is None
    modest.rollback(3)
    assert allowed(modest, vocabulary) == {take[1 + ord("[")]}


@needs_native
def test_an_output_that_hits_a_limit_twice_ends_with_an_error_and_it_alone() -> None:
    endless = {"root": concat(Literal("x"), Alt((Ref("a"), Literal("y"))))}
    endless["a"] = Alt((concat(Ref("a"), Literal("a")), Literal("b")))
    bound = FsmGrammar(lazy_of(Grammar(endless)), SINGLE_BYTES)
    greedy, modest = bound.matcher(), bound.matcher()
    assert greedy.consume(ord("x")) and not greedy.consume(ord("y"))
    assert greedy.error() == LIMIT_REACHED
    assert not allowed(greedy, SINGLE_BYTES) and not greedy.is_accepting()
    for matcher in (modest, bound.matcher()):
        assert allowed(matcher, SINGLE_BYTES) == {ord("x")} and matcher.error() is None


def agree(dfa: Dfa, lark: str, vocabulary: Vocabulary, seed: int) -> None:
    fsm = FsmGrammar(dfa, vocabulary).matcher()
    pushdown = PushdownGrammar(lark, vocabulary).matcher()
    tokens = random_walk(fsm, vocabulary, seed)
    fsm.rollback(len(tokens))
    for token in [*tokens, None]:
        assert allowed(pushdown, vocabulary) == allowed(fsm, vocabulary)
        assert pushdown.is_accepting() == fsm.is_accepting()
        assert pushdown.is_finished() == fsm.is_finished()
        assert pushdown.error() is None
        if token is not None:
            assert fsm.consume(token) and pushdown.consume(token)


@settings(max_examples=25, deadline=None)
@given(vocabularies(), seeds)
def test_a_recursive_mask_is_that_of_single_bytes(vocabulary: Vocabulary, seed: int) -> None:
    lark = json_to_lark(NESTED)
    matcher = PushdownGrammar(lark, vocabulary).matcher()
    tokens = random_walk(matcher, vocabulary, seed, max_tokens=6)
    truth = PushdownGrammar(lark, SINGLE_BYTES).matcher()
    assert all(truth.consume(byte) for byte in written(vocabulary, tokens))
    expected = set()
    for token in vocabulary.written_ids:
        taken = 0
        for byte in vocabulary.token_bytes[token]:
            if not truth.consume(byte):
                break
            taken += 1
        truth.rollback(taken)
        if taken == len(vocabulary.token_bytes[token]):
            expected.add(token)
    assert allowed(matcher, vocabulary) == expected


@settings(max_examples=25, deadline=None)
@given(json_grammars(), vocabularies(), seeds, st.booleans(), st.data())
def test_rollback_restores_what_was(
    grammar: Grammar, vocabulary: Vocabulary, seed: int, is_fsm: bool, data: st.DataObject
) -> None:
    bound = (
        FsmGrammar(dfa_of(grammar), vocabulary)
        if is_fsm
        else PushdownGrammar(json_to_lark(grammar), vocabulary)
    )
    matcher, seen = bound.matcher(), []
    tokens = random_walk(bound.matcher(), vocabulary, seed)
    for token in tokens:
        seen.append(observed(matcher, vocabulary))
        matcher.consume(token)
    num_tokens = data.draw(st.integers(0, len(tokens)))
    matcher.rollback(num_tokens)
    for token in tokens[len(tokens) - num_tokens :]:
        assert observed(matcher, vocabulary) == seen[len(tokens) - num_tokens]
        assert matcher.consume(token)
        num_tokens -= 1


@settings(max_examples=25, deadline=None)
@given(json_grammars(), vocabularies(), seeds, seeds, st.booleans(), st.data())
def test_a_fork_and_what_it_was_forked_from_go_their_own_ways(
    grammar: Grammar,
    vocabulary: Vocabulary,
    seed: int,
    other_seed: int,
    is_fsm: bool,
    data: st.DataObject,
) -> None:
    bound = (
        FsmGrammar(dfa_of(grammar), vocabulary)
        if is_fsm
        else PushdownGrammar(json_to_lark(grammar), vocabulary)
    )
    tokens = random_walk(bound.matcher(), vocabulary, seed)
    first = bound.matcher()
    num_tokens = data.draw(st.integers(0, len(tokens)))
    for token in tokens[:num_tokens]:
        first.consume(token)
    second = first.fork()
    assert observed(second, vocabulary) == observed(first, vocabulary)
    others = random_walk(second, vocabulary, other_seed)
    for token in tokens[num_tokens:]:
        assert first.consume(token)
    for matcher, taken in ((first, tokens), (second, [*tokens[:num_tokens], *others])):
        alone = bound.matcher()
        assert all(alone.consume(token) for token in taken)
        assert observed(matcher, vocabulary) == observed(alone, vocabulary)
    second.rollback(len(others) + num_tokens)
    assert observed(second, vocabulary) == observed(bound.matcher(), vocabulary)


def observed(matcher: object, vocabulary: Vocabulary) -> object:
    assert isinstance(matcher, object)
    return (
        allowed(matcher, vocabulary),  # type: ignore[arg-type]
        matcher.is_accepting(),  # type: ignore[attr-defined]
        matcher.is_finished(),  # type: ignore[attr-defined]
        tuple(matcher.forced_tokens()),  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("path", ["fsm", "pushdown"])
def test_a_refused_token_changes_nothing(path: str) -> None:
    grammar = Grammar.of(Literal("ab"))
    matcher = (
        FsmGrammar(build_dfa(grammar), SINGLE_BYTES).matcher()
        if path == "fsm"
        else PushdownGrammar(regular_to_lark(grammar), SINGLE_BYTES).matcher()
    )
    assert not matcher.consume(ord("b"))
    assert matcher.error() is None
    assert matcher.consume(ord("a")) and not matcher.consume(ord("a")) and matcher.consume(ord("b"))
    assert matcher.is_finished()
    assert not matcher.consume(ord("b"))
    matcher.rollback(2)
    assert allowed(matcher, SINGLE_BYTES) == {ord("a")}


@pytest.mark.parametrize("path", ["fsm", "pushdown"])
def test_a_character_may_be_split_over_tokens(path: str) -> None:
    tokens = [b'"', b"\xe6", b"\x9d\xb1", b"\x9d", b"\xb1", b"\xe6\x9d", "東".encode()]
    vocabulary = vocabulary_of(tokens)
    grammar = Grammar.of(Literal('"東"'))
    matcher = (
        FsmGrammar(build_dfa(grammar), vocabulary).matcher()
        if path == "fsm"
        else PushdownGrammar(regular_to_lark(grammar), vocabulary).matcher()
    )
    for split in ([6], [1, 2], [1, 3, 4], [5, 4]):
        assert matcher.consume(0) and all(matcher.consume(token) for token in split)
        assert matcher.consume(0) and matcher.is_finished()
        matcher.rollback(2 + len(split))


def test_a_shared_row_is_not_changed_by_who_got_it() -> None:
    bound = FsmGrammar(build_dfa(Grammar.of(Literal("ab"))), SINGLE_BYTES)
    out = np.empty(SINGLE_BYTES.num_words, np.uint32)
    bound.matcher().mask(out)
    out[:] = 0
    assert allowed(bound.matcher(), SINGLE_BYTES) == {ord("a")}


def test_outputs_of_a_pushdown_grammar_are_apart() -> None:
    bound = PushdownGrammar(json_to_lark(NESTED), SINGLE_BYTES)
    first, second = bound.matcher(), bound.matcher()
    for byte in b"[[a]":
        assert first.consume(byte)
    assert allowed(second, SINGLE_BYTES) == {ord("[")}
    assert allowed(first, SINGLE_BYTES) == {ord("]")}


def test_an_exhausted_parser_is_an_error_of_that_output_alone() -> None:
    bound = PushdownGrammar("start: /[ab]?(a{1000}){100}/", SINGLE_BYTES)
    deep = bound.matcher()
    assert deep.consume(ord("b"))
    deep.forced_tokens()
    while deep.consume(ord("a")):
        assert deep.error() is None
    assert "states" in str(deep.error())
    assert not allowed(deep, SINGLE_BYTES) and not deep.consume(ord("a"))
    assert bound.matcher().consume(ord("a"))


def test_a_vocabulary_that_cannot_begin_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="no token"):
        FsmGrammar(build_dfa(Grammar.of(Literal("x"))), vocabulary_of([b"a", b"b"]))


def test_a_text_that_the_vocabulary_cannot_go_on_with_is_an_error() -> None:
    matcher = FsmGrammar(
        build_dfa(Grammar.of(Literal("ax"))), vocabulary_of([b"a", b"b"])
    ).matcher()
    assert matcher.error() is None and matcher.consume(0)
    assert matcher.error() is not None and not matcher.is_finished()
    matcher.rollback(1)
    assert matcher.error() is None


def test_an_ambiguous_grammar_ends_in_an_error_before_a_step_is_slow() -> None:
    matcher = PushdownGrammar('start: x\nx: x x | "a" | x "b"', SINGLE_BYTES).matcher()
    for _ in range(1000):
        allowed(matcher, SINGLE_BYTES)
        if not matcher.consume(ord("a")):
            break
    assert "items" in str(matcher.error())


def test_masks_leave_out_what_writes_nothing() -> None:
    vocabulary = vocabulary_of([b"a", None, b"b", b""], padding=30)
    bound = PushdownGrammar("start: /[ab]*/", vocabulary)
    assert allowed(bound.matcher(), vocabulary) == {0, 2}
    assert alive_tokens(build_dfa(Grammar.of(Literal("a"))), 1, vocabulary) <= {0, 2}
    assert json.dumps(sorted(allowed(bound.matcher(), vocabulary))) == "[0, 2]"


FUELLED = (
    '{"type":"string","minLength":1,"maxLength":200,"pattern":"^(?:\\\\S+\\\\s+){0,19}\\\\S+$"}'
)
SPECS = (
    GrammarSpec("json_schema", FUELLED),
    GrammarSpec("json_schema", '{"$ref":"#/$defs/n","$defs":{"n":{"type":"array","items":'
                '{"anyOf":[{"$ref":"#/$defs/n"},{"type":"string"},{"type":"number"}]}}}}'),
    GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"string","format":'
                '"date"}},"additionalProperties":{"type":"integer"}}'),
    GrammarSpec("json_object"),
    GrammarSpec("regex", r"(?:[ab]+,){0,30}c(?:d{3}e?){1,4}"),
    GrammarSpec("ebnf", 'start: "~" | /[A-Z]/ A B\nA: /a+/\nB: /ab/'),
    GrammarSpec("ebnf", 'start: p ("," p)*\np: /[a-z]+/ "=" ("(" start ")" | /[0-9]{1,80}/)'),
    GrammarSpec("structural_tag", '{"triggers":["<f"],"structures":[{"begin":"<f>","schema":'
                '{"type":"object","properties":{"x":{"type":"boolean"}}},"end":"</f>"}]}'),
)  # fmt: skip


def test_text_that_costs_fuel_is_consumed_without_masks() -> None:
    matcher = compile_grammar(SPECS[0]).bind(SINGLE_BYTES).matcher()
    assert all(matcher.consume(byte) for byte in b'"Up to 24 hours"'), matcher.error()
    assert matcher.is_finished()


def test_a_grammar_beyond_the_lexers_limits_is_told_what_to_change() -> None:
    """The library's own words name its settings, which no request can change."""
    word = " & ".join(f"/.*{letter}.{{30}}/" for letter in "abcdefgh")
    with pytest.raises(InvalidGrammar, match="remedy: smaller counts") as refusal:
        PushdownGrammar(f"start: A\nA: {word}", SINGLE_BYTES)
    assert "limits." not in str(refusal.value)


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_a_matcher_says_the_same_by_every_way_of_asking(spec: GrammarSpec) -> None:
    """Each token with a mask before it, none with, and masks now and then: yes, no, or an error."""
    compiled = compile_grammar(spec)
    rng = random.Random(spec.source)
    for seed in range(12):
        walker = compiled.bind(SINGLE_BYTES).matcher()
        tokens = random_walk(walker, SINGLE_BYTES, seed, max_tokens=40)
        said = consumed(compiled, tokens, 1)
        assert said[0] == [True] * len(tokens) and said[1] is None
        if rng.random() < 0.5:  # a text that is not in the language
            tokens[rng.randrange(len(tokens))] = rng.randrange(32, 127)
            said = consumed(compiled, tokens, 1)
        for between in (2, 5, 1000):
            assert consumed(compiled, tokens, between) == said


def consumed(
    compiled: CompiledGrammar, tokens: Sequence[int], between: int
) -> tuple[list[bool], str | None, bool]:
    """What consume says of each token, with a mask before every `between`-th, by a new lexer."""
    matcher = compiled.bind(SINGLE_BYTES).matcher()
    taken = []
    for index, token in enumerate(tokens):
        mask = allowed(matcher, SINGLE_BYTES) if (index + 1) % between == 0 else None
        taken.append(matcher.consume(token))
        assert mask is None or taken[-1] == (token in mask)
    return taken, matcher.error(), matcher.is_accepting()


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from(["regex", "json_schema"]))
def test_next_bytes_are_the_single_bytes_of_the_mask(seed: int, kind: str) -> None:
    source = {"regex": "(ab|[c-e]{2,4})*x?", "json_schema": '{"type": "object"}'}[kind]
    bound = compile_grammar(GrammarSpec(kind, source)).bind_unwatched(SINGLE_BYTES)  # type: ignore[arg-type]
    matcher = bound.matcher()
    assert isinstance(matcher, FsmMatcher)
    random_walk(matcher, SINGLE_BYTES, seed, max_tokens=8)
    following = matcher.next_bytes()
    found = {byte for byte in range(256) if following >> byte & 1}
    assert found == allowed(matcher, SINGLE_BYTES)
