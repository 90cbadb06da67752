"""Regexes against Python's `re`, and the cases in which ECMA-262 differs."""

from __future__ import annotations

import contextlib
import itertools
import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stemma.constrained.grammar import Grammar
from stemma.constrained.regular.build import build_dfa
from stemma.constrained.regular.dfa import Dfa
from stemma.constrained.regular.regex_parser import Dialect, parse_regex
from stemma.errors import InvalidGrammar

_atoms = st.sampled_from(
    ["a", "b", "c", ".", "[ab]", "[^a]", "[^\\n]", r"\w", r"\W", r"\d", r"\s", r"\n", "\n", "é"]
)
_quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}", "{2,}", "*?", "+?", "??"])


def _wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = inner.map("(?:{})".format)
    return st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map("|".join).map("({})".format),
        st.builds("{}{}".format, groups | _atoms, _quantifiers),
        inner.map("(?={})".format),
        st.builds("{}{}".format, st.sampled_from([r"\b", r"\B", "(?<=a)", "(?<!ab)"]), inner),
        inner.map("(?!{})".format),
        st.builds("(?:(?!{}){})".format, _atoms, inner),
        st.builds("(?:{}(?<{}{}))".format, inner, st.sampled_from("=!"), _atoms),
    )


regexes = st.recursive(_atoms | st.sampled_from(["^", "$", ""]), _wider, max_leaves=6)
texts = st.text("abc\né ", max_size=5)


def dfa_of(pattern: str, dialect: Dialect = "ecma", anchored: bool = False) -> Dfa:
    expression = parse_regex(pattern, dialect=dialect, anchored=anchored)
    return build_dfa(Grammar.of(expression), max_states=2000)


@settings(max_examples=300, deadline=None)
@given(regexes, st.booleans(), st.lists(texts, min_size=5, max_size=20))
@example("^a|b$", False, ["a", "ba", "ab", "xb", "xbx", "b\n"])
@example("(^a|b)c", False, ["ac", "xac", "xbc"])
@example("(?:a$|\\n)*c?", True, ["a\n", "a", "a\nc", "\n\na\n"])
@example("(?:^b?)*a|(?!^a)b", False, ["ba", "cba", "b", "ab"])
@example("(b(?!c)){2}c?", True, ["bb", "bbc", "bc"])
@example("(?:(?!a)[ab]{1,3}(?<!b)c?)+", True, ["ba", "bba", "bab", "bacba", "bacab"])
def test_matches_what_python_matches(pattern: str, anchored: bool, words: list[str]) -> None:
    pattern = "(?a)" + pattern  # the sets of Unicode's make large automata
    try:
        dfa = dfa_of(pattern, "python", anchored)
    except InvalidGrammar as error:
        unsupported = "is supported only|an assertion within a lookbehind|kinds of characters"
        assume(not re.search(unsupported + "|a lookbehind after an unbounded", str(error)))
        raise
    expected = re.compile(pattern)
    for word in words:
        found = expected.fullmatch(word) if anchored else expected.search(word)
        assert dfa.matches(word.encode()) == (found is not None), word


@settings(max_examples=100, deadline=None)
@given(st.text("ab()[]{}|*+?^$.\\-,1dpu=!:<P", max_size=10))
def test_any_text_is_parsed_or_refused_and_never_taken_where_python_refuses(text: str) -> None:
    with contextlib.suppress(InvalidGrammar):
        parse_regex(text, dialect="ecma", anchored=False)
    try:
        parse_regex(text, dialect="python", anchored=True)
    except InvalidGrammar:
        return
    re.compile(text)


@pytest.mark.parametrize(
    "pattern, inside, outside",
    [
        (r"^\d$", "1", "٣"),  # digits are ASCII's
        (r"^\w$", "_", "é"),
        (r"^\s$", "\ufeff", "\x85"),
        (r"^a$", "a", "a\n"),  # $ is the very end
        (r"^.$", "\x85", "\u2028"),  # line terminators
        (r"^[^]$", "\n", ""),
        (r"^(?:[]|a)$", "a", "]"),
        (r"^\cA\0\x41\u0042\u{43}$", "\x01\0ABC", "c"),
        (r"^\ud83d\ude00$", "😀", "😁"),  # a pair of escapes is one character
        (r"^[\ud83d\ude00-\ud83d\ude02]$", "😁", "😃"),
        (r"^.$", "😀", "ab"),
        (r"^\p{Lu}\P{L}$", "É1", "éa"),
        (r"^[\w-.]+$", "a-.", "a b"),
        (r"^{\-}$", "{-}", "-"),
        (r"^[\b]$", "\b", "b"),
        (r"^(?<year>\d{4})$", "2024", "20245"),
        (r"^(?i:straße)1$", "STRASSE1".replace("SS", "ẞ"), "STRASSE1"),
        (r"(?i)^k$", "\u212a", "x"),
        (r"^((?!ab).)*$", "acb", "cab"),
        (r"^(?=.*[A-Z])(?=.*\d)[^ ]{3,}$", "a1B", "ab1"),
        (r"^(?!.*(?:\.\.))a", "a.b", "a..b"),
        (r"foo|^bar$", "xfoox", "xbar"),
        (r"^a{2,3}?$", "aaa", "aaaa"),
        (r"^((?!-)[a-z-]{1,9}(?<!-)\.)+[a-z]{2,6}$", "a-b.c.de", "a.-b.de"),
    ],
)
def test_ecma_dialect(pattern: str, inside: str, outside: str) -> None:
    dfa = dfa_of(pattern)
    assert dfa.matches(inside.encode()) and not dfa.matches(outside.encode())


@pytest.mark.parametrize(
    "dialect, pattern, position, reason",
    [
        ("ecma", "a(b", 1, "not closed"),
        ("ecma", "ab)", 2, "no group is open"),
        ("ecma", "a[bc", 1, "not closed"),
        ("ecma", "a**", 2, "nothing to repeat"),
        ("ecma", "^*", 1, "nothing to repeat"),
        ("ecma", "x{3,2}", 1, "at least 3 and at most 2"),
        ("ecma", "x{9999999999}", 1, "count"),
        ("ecma", "[b-a]", 1, "descending"),
        ("ecma", "ab\\", 2, "nothing follows"),
        ("ecma", r"(a)\1", 3, "backreferences"),
        ("ecma", r"(?<n>a)\k<n>", 7, "backreferences"),
        ("ecma", "a(?<!a{1,9})b", 1, "lookbehind over more than 8"),
        ("ecma", "(?<!^a)b", 0, "assertion within a lookbehind"),
        ("ecma", r"(?:\ba)*b", 7, "unbounded repetition"),
        ("ecma", "(?<=[a-c][b-d][c-e][d-f])b", 0, "kinds of characters"),
        ("ecma", r"\a", 0, "unknown escape"),
        ("ecma", r"a\Z", 1, "unknown escape"),
        ("ecma", r"\ud800", 0, "surrogate"),
        ("ecma", r"[\udc00]", 1, "surrogate"),
        ("ecma", "a\ud800", 1, "surrogate"),
        ("ecma", r"\u{110000}", 0, "code point"),
        ("ecma", r"\xg1", 0, "hexadecimal"),
        ("ecma", r"\p{Foo}", 0, "Foo"),
        ("ecma", r"\01", 0, "octal"),
        ("ecma", "(?:(?=bc)b)*c", 11, "unbounded repetition"),
        ("ecma", "(?P<n>a)", 0, "kind of group"),
        ("ecma", "a(?i)b", 1, "start"),
        ("ecma", "(?:(?=ab).){60}", 0, "more than 50"),
        ("ecma", "(" * 5000 + ")" * 5000, 50, "nested deeper"),
        ("ecma", "a" * 50_001, 50_000, "longer"),
        ("python", "(?P<n>a)(?P=n)", 8, "backreferences"),
        ("python", "(?(1)a|b)", 0, "conditional"),
        ("python", "(?>a)", 0, "atomic"),
        ("python", "a++", 1, "possessive"),
        ("python", r"[a-\d]", 1, "range between classes"),
        ("python", "(?x)a", 0, "flag x"),
    ],
)
def test_refusals_name_the_position_and_the_construct(
    dialect: Dialect, pattern: str, position: int, reason: str
) -> None:
    with pytest.raises(InvalidGrammar, match=f"position {position}: .*{reason}"):
        parse_regex(pattern, dialect=dialect, anchored=False)


@pytest.mark.parametrize("part", ["(?!a)b", "(?!a)[ab]?", "(?!a)", "(?=ab)a|", "(?:^a|b$)", "$|^"])
def test_many_assertions_are_taken_or_refused_without_recursion(part: str) -> None:
    nested = "(?:" * 49 + part * 3 + f"b){part * 3}" * 49 + "b"
    for pattern in (part * 2000 + "b", nested):
        with contextlib.suppress(InvalidGrammar):
            parse_regex(pattern, anchored=False)


def test_many_lookaheads_stay_within_bounds() -> None:
    with pytest.raises(InvalidGrammar, match="too large"):
        parse_regex("(?:(?=ab)a|b)" * 40, anchored=True)


LOOKING_BACK = [
    r"\bab\b", r"a\Bb", r"\B", r"\b", r"^\b.*\b$", r"(a\b|b\B)[ab -]", r"\b(a|-)+\b", r"a*\b-",
    r"(?<=a)b", r"(?<!a)b", r"(?<!-)$", r"[ab-]+(?<!-)$", r"(?<=ab)-", r"(?<!a.)b",
    r"(?:a|b-)*(?<=b)(a|-)", r"(?<![ab]{2})-", r"(?<=a)(?=b)", r"(?:(?<=a)b|a){2}",
    r"(?m)^a$", r"(?m)^(a|b)+$", r"(?m)a$\n^b", r"(?m)^$", r"^.*(?<=[a-b])(?!-)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", LOOKING_BACK)
def test_what_looks_back_is_as_python_has_it(pattern: str) -> None:
    """Each text over a few characters, found within and matched as a whole."""
    pattern = pattern if "(?m)" in pattern else f"(?a){pattern}"  # Unicode's sets are large
    within, whole = dfa_of(pattern, "python"), dfa_of(pattern, "python", anchored=True)
    for length in range(5):
        for text in map("".join, itertools.product("ab-\n", repeat=length)):
            assert within.matches(text.encode()) == bool(re.search(pattern, text)), repr(text)
            assert whole.matches(text.encode()) == bool(re.fullmatch(pattern, text)), repr(text)


def test_other_engines_syntax_is_read_in_extended_regexes() -> None:
    for pattern, text in ((r"\p{Lu}+", "É"), (r"(?<year>[0-9]{4})", "2026")):
        assert dfa_of(pattern, "extended", anchored=True).matches(text.encode())
        with pytest.raises(InvalidGrammar):
            parse_regex(pattern, dialect="python", anchored=True)


def test_the_empty_text_has_a_position_that_is_no_boundary_for_ecma_alone() -> None:
    assert dfa_of(r"\B").matches(b"")
    assert not dfa_of(r"(?a)\B", "python").matches(b"")
