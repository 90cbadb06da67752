"""Automata against plain matching, C++ against Python, and what happens at the limits."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time

import numpy as np
import pytest
from expressions import ends, expressions, tail_recursive_grammars, texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stemma.constrained.grammar import (
    NOTHING,
    Alt,
    And,
    Chars,
    Concat,
    Expression,
    Grammar,
    Literal,
    Not,
    Ref,
    Repeat,
    concat,
    optional,
)
from stemma.constrained.native.bindings import library, why_not_native
from stemma.constrained.regular import build
from stemma.constrained.regular.build import NotRegular, TooManyStates, build_dfa
from stemma.constrained.regular.charsets import ALL
from stemma.constrained.regular.dfa import Dfa
from stemma.constrained.regular.limits import Budget
from stemma.constrained.regular.reference import reference_dfa
from stemma.constrained.regular.regex_parser import parse_regex
from stemma.errors import InvalidGrammar

needs_native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
ANY_TEXT = Repeat(Chars(ALL), 0, None)


def of(expression: Expression) -> Dfa:
    return build_dfa(Grammar.of(expression))


def by_python(grammar: Grammar, max_states: int = 5000) -> Dfa:
    return reference_dfa(grammar, Budget.of(max_states, None))


def are_same(a: Dfa, b: Dfa) -> bool:
    """Equal tables; as states are numbered by their place, these are equal languages."""
    return (
        a.start == b.start
        and np.array_equal(a.class_of, b.class_of)
        and np.array_equal(a.transitions, b.transitions)
        and np.array_equal(a.accepting, b.accepting)
    )


@settings(max_examples=100, deadline=None)
@given(expressions, st.lists(texts, min_size=10, max_size=20))
def test_automata_match_what_expressions_say(expression: Expression, words: list[str]) -> None:
    dfa = by_python(Grammar.of(expression))
    for word in words:
        assert dfa.matches(word.encode()) == (len(word) in ends(expression, word, 0)), word


@needs_native
@settings(max_examples=70, deadline=None)
@given(expressions.map(Grammar.of) | tail_recursive_grammars())
@example(Grammar.of(NOTHING))
@example(Grammar.of(Literal("")))
@example(Grammar.of(Not(ANY_TEXT)))
@example(Grammar.of(parse_regex(r"[\w-]{3}\P{sc=Greek}+", anchored=False)))
def test_compiled_code_makes_the_same_table_as_python(grammar: Grammar) -> None:
    assert are_same(build_dfa(grammar), by_python(grammar))


@settings(max_examples=50, deadline=None)
@given(expressions, expressions, expressions)
def test_operators_follow_the_laws_of_sets(a: Expression, b: Expression, c: Expression) -> None:
    assert are_same(of(Not(Not(a))), of(a))
    assert are_same(of(Not(Alt((a, b)))), of(And((Not(a), Not(b)))))
    assert are_same(of(And((a, Alt((b, c))))), of(Alt((And((a, b)), And((a, c))))))
    assert of(And((a, Not(a)))).is_empty
    assert are_same(of(Alt((a, Not(a)))), of(ANY_TEXT))


@settings(max_examples=30, deadline=None)
@given(expressions)
def test_automata_are_trimmed_and_minimal(expression: Expression) -> None:
    dfa = of(expression)
    accepted_from = {dfa.start: b""}
    for state in (queue := [dfa.start]):
        for byte in range(256):
            target = dfa.step(state, byte)
            if target not in accepted_from and target != 0:
                accepted_from[target] = accepted_from[state] + bytes([byte])
                queue.append(target)
    assert dfa.is_empty or sorted(accepted_from) == list(range(1, dfa.num_states))
    kinds = {tuple(_distinguished(dfa, state)) for state in range(dfa.num_states)}
    assert len(kinds) == dfa.num_states


def _distinguished(dfa: Dfa, state: int) -> list[int]:
    """The block of a state after as many rounds of Moore's refinement as there are states."""
    blocks = dfa.accepting.astype(int)
    for _ in range(dfa.num_states):
        rows = np.column_stack([blocks, blocks[dfa.transitions]])
        blocks = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return [int(blocks[state])]


@given(st.binary(max_size=6))
@example(b"\xed\xa0\x80")  # a surrogate
@example(b"\xc0\x80")  # overlong
@example(b"\xf4\x90\x80\x80")  # beyond the last code point
@example(b"\xf0\x9f\x98")  # cut off
@example("😀é\x00".encode())
def test_no_automaton_accepts_invalid_utf8(data: bytes) -> None:
    try:
        text: str | None = data.decode()
    except UnicodeDecodeError:
        text = None
    assert of(ANY_TEXT).matches(data) == (text is not None)
    assert of(Not(Literal("a"))).matches(data) == (text is not None and text != "a")


def test_a_reference_at_a_rules_end_is_a_jump() -> None:
    pairs = Grammar({"root": Alt((Concat((Literal("ab"), Ref("root"))), Literal("")))})
    assert are_same(build_dfa(pairs), of(Repeat(Literal("ab"), 0, None)))


def test_optional_parts_that_share_what_follows_stay_linear() -> None:
    rules: dict[str, Expression] = {"after 200": Literal("}")}
    for i in range(200):
        rest = Ref(f"after {i + 1}")
        rules[f"after {i}"] = Alt((Concat((Literal(f'"p{i}"'), rest)), rest))
    assert build_dfa(Grammar(rules, "after 0")).num_states < 200 * 7


@pytest.mark.parametrize(
    "root",
    [
        concat(Literal("("), optional(Ref("root")), Literal(")")),
        Alt((concat(Ref("root"), Literal("x")), Literal("y"))),  # left recursion
        Alt((And((Ref("root"), ANY_TEXT)), Literal("y"))),
        Alt((Concat((Literal("x"), Ref("other"))), Literal("y"))),
    ],
)
def test_other_recursion_is_not_regular(root: Expression) -> None:
    grammar = Grammar({"root": root, "other": Concat((Ref("root"), Literal("z")))})
    for make in (build_dfa, by_python):
        with pytest.raises(NotRegular, match=r"'(root|other)'"):
            make(grammar)


def test_a_missing_rule_is_named() -> None:
    for make in (build_dfa, by_python):
        with pytest.raises(InvalidGrammar, match="'nowhere'"):
            make(Grammar.of(Concat((Literal("a"), Ref("nowhere")))))


DENSE = ["(a|b|[c-z])*a.{15}", r"\w*x(.|\w{3}){12}"]
HUGE = ["(a{1000}){100}", "a{100000}", "(a|b)*a(a|b){20}", "((a?){1000}){1000}", "a{2147483647}"]


@pytest.mark.parametrize("pattern", HUGE)
def test_huge_automata_are_refused_quickly(pattern: str) -> None:
    grammar = Grammar.of(parse_regex(pattern, anchored=True))
    for make in (_built, by_python):
        started = time.process_time()  # whatever else the machine does
        with pytest.raises(TooManyStates, match="more than"):
            make(grammar, 1000)
        assert time.process_time() - started < 2.0


def _built(grammar: Grammar, max_states: int) -> Dfa:
    return build_dfa(grammar, max_states=max_states)


def test_huge_automata_take_little_memory() -> None:
    """At the default limits, as the peak of a process of its own."""
    code = (
        "from stemma.constrained.grammar import Grammar\n"
        "from stemma.constrained.regular.build import TooManyStates, build_dfa\n"
        "from stemma.constrained.regular.regex_parser import parse_regex\n"
        f"for pattern in {[*HUGE[:3], *DENSE]!r}:\n"
        "    try: build_dfa(Grammar.of(parse_regex(pattern, anchored=True)), max_cpu_s=2.0)\n"
        "    except TooManyStates: pass\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout.split()[1]) < 500 * 1024  # KiB


def test_the_deadline_ends_a_build() -> None:
    grammar = Grammar.of(parse_regex("(a|b)*a(a|b){14}", anchored=True))
    with pytest.raises(TooManyStates, match="time"):
        build_dfa(grammar, max_cpu_s=0.0)
    with pytest.raises(TooManyStates, match="time"):
        reference_dfa(grammar, Budget.of(50_000, 0.0))


def test_deep_and_shared_expressions_do_not_overflow() -> None:
    deep: Expression = Literal("a")
    shared: Expression = Literal("a")
    negated: Expression = Literal("a")
    for _ in range(5000):
        deep = Concat((deep, Repeat(Literal("b"), 0, 1)))
        shared = Alt((shared, shared))
        negated = Not(negated)
    for make in (_built, by_python):
        for expression in (deep, shared, negated):
            with pytest.raises(TooManyStates):
                make(Grammar.of(expression), 500)


@needs_native
@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-2, 12) | st.integers(-(2**31), 2**31 - 1), max_size=40))
@example([1, 0, 0, 1, 2, 0, 1, 0, 0])  # a concatenation of itself
@example([1, 1, 0, 0, 7, 0, 0, 0, 0])  # a rule that is itself
def test_malformed_input_is_an_error_and_no_crash(words: list[int]) -> None:
    native, outcome = library(), (ctypes.c_int32 * 2)()
    assert native is not None
    array = np.array(words, np.int32)
    handle = native.stemma_build_automaton(array.ctypes.data, len(array), 1000, 1000, 1.0, outcome)
    assert (handle is None) == (outcome[0] != 0)
    native.stemma_free_automaton(handle)


def test_without_a_compiler_python_makes_the_automaton(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar.of(parse_regex("(ab|é)+", anchored=True))
    expected = build_dfa(grammar)
    monkeypatch.setattr(build, "library", lambda: None)
    monkeypatch.setattr(build, "compiled_dfa", None)
    assert are_same(build_dfa(grammar), expected)
