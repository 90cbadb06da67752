"""Questions about languages against words that are tried one by one."""

from __future__ import annotations

import itertools

import pytest
from expressions import ends, expressions
from hypothesis import given, settings

from stemma.constrained.grammar import (
    EMPTY_WORD,
    NOTHING,
    Alt,
    And,
    Expression,
    Literal,
    Not,
    Repeat,
)
from stemma.constrained.regular.languages import finite_words, is_known_empty
from stemma.constrained.regular.regex_parser import parse_regex

WORDS = ["".join(word) for size in range(4) for word in itertools.product("ab", repeat=size)]


def matched(expression: Expression) -> set[str]:
    return {word for word in WORDS if len(word) in ends(expression, word, 0)}


def regex(pattern: str) -> Expression:
    return parse_regex(pattern, anchored=True)


@settings(max_examples=60, deadline=None)
@given(expressions, expressions)
def test_answers_agree_with_the_words_that_match(a: Expression, b: Expression) -> None:
    in_a, in_b = matched(a), matched(b)
    assert not (in_a and is_known_empty(a))
    assert not (in_a & in_b and is_known_empty(And((a, b))))
    assert is_known_empty(And((a, Not(a))))
    words = finite_words(a, 1000)
    if words is not None:
        assert in_a == set(words) & set(WORDS)
        assert all(len(word) in ends(a, word, 0) for word in words)
        assert list(words) == sorted(set(words), key=str.encode)


def test_what_takes_too_many_states_is_neither_known_empty_nor_finite() -> None:
    many = regex("(a|b)*a(a|b){16}")
    empty = And((many, Not(regex("[ab]*"))))
    assert not is_known_empty(empty) and finite_words(empty, 10) is None
    assert is_known_empty(And((regex("[a-m]+"), regex("[n-z]+"))))
    assert not is_known_empty(And((regex("a*"), regex("b*"))))


@pytest.mark.parametrize(
    "expression, limit, words",
    [
        (regex("b|a[xé]|"), 10, ("", "ax", "aé", "b")),
        (regex("[a-c]"), 3, ("a", "b", "c")),
        (regex("[a-c]"), 2, None),
        (regex("a*"), 1000, None),
        (NOTHING, 0, ()),
        (EMPTY_WORD, 1, ("",)),
        (Repeat(Literal("ab"), 0, 2), 5, ("", "ab", "abab")),
    ],
)
def test_finite_words(expression: Expression, limit: int, words: tuple[str, ...] | None) -> None:
    assert finite_words(expression, limit) == words


def test_questions_about_deep_expressions_do_not_overflow() -> None:
    deep: Expression = Literal("a")
    for _ in range(5000):
        deep = Alt((deep,))
    assert finite_words(deep, 1) == ("a",) and not is_known_empty(deep)
