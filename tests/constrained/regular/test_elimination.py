"""Expressions made of automata against the automata."""

from __future__ import annotations

import pytest
from expressions import expressions
from hypothesis import given, settings

from stemma.constrained.grammar import And, Chars, Concat, Expression, Grammar, Literal, Repeat
from stemma.constrained.json_tokens import JsonShapes
from stemma.constrained.regular.build import build_dfa
from stemma.constrained.regular.elimination import TooLarge, rules_of
from stemma.constrained.regular.regex_parser import parse_regex


@settings(max_examples=80, deadline=None)
@given(expressions)
def test_the_rules_have_the_automatons_language_and_no_recursion(expression: Expression) -> None:
    ascii_only = And((expression, Repeat(Chars(((0, 127),)), 0, None)))
    dfa = build_dfa(Grammar.of(ascii_only))
    rules = rules_of(dfa, "root", 500)
    assert not JsonShapes(rules).recursive
    again = build_dfa(Grammar(rules))
    assert again.transitions.shape[0] == dfa.transitions.shape[0]
    assert [again.accepting[again.walk(again.start, word)] for word in _WORDS] == [
        dfa.accepting[dfa.walk(dfa.start, word)] for word in _WORDS
    ]


_WORDS = [bytes([a, b, c]).strip(b"x") for a in b"abx" for b in b"abx" for c in b"abx"]


def test_what_takes_too_many_states_or_rules_is_refused() -> None:
    long = build_dfa(Grammar.of(Literal("a" * 400)))
    with pytest.raises(TooLarge, match="300 states"):
        rules_of(long, "root", 500)
    tangled = build_dfa(Grammar.of(parse_regex("(a|b)*a(a|b){5}", anchored=True)))
    with pytest.raises(TooLarge, match="10 rules"):
        rules_of(tangled, "root", 10)
    assert len(rules_of(tangled, "root", 5000)) > 10


def test_short_paths_are_no_rules_of_their_own() -> None:
    short = build_dfa(Grammar.of(Concat((Literal("ab"), Literal("c")))))
    assert list(rules_of(short, "root", 0)) == ["root"]
