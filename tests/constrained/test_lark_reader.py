"""Warnings about a caller's terminals that swallow what follows others."""

from __future__ import annotations

import pytest

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.lark_reader import swallowing_terminals
from stemma.constrained.spec import GrammarSpec


@pytest.mark.parametrize(
    ("source", "pairs"),
    [
        ('start: WORD "end"\nWORD: /[a-z]+/', [("WORD", "WORD")]),
        ('start: WORD " end"\nWORD: /[a-z]+/', []),
        ("start: /[A-Z]/ A B\nA: /a+/\nB: /ab/", [("A", "A")]),
        ('start: ("{" | "{a") "b" | "{" "ab"', [('"{"', '"{a"')]),
        ('start: NUMBER+ (SPACE NUMBER)*\nNUMBER: DIGIT+\nDIGIT: "0" | "1"\nSPACE: " "',
         [("NUMBER", "NUMBER")]),
        ('start: "(" start ")" | /[a-c]{2,3}/ "x"?  // a comment\n', []),
        ('start: (A | B){2}\n\nA: "a" "b"?\nB: "b"\n', [("A", "A")]),
        ('%import common.WORD\nstart: WORD "end"', []),  # not read
        ('start[lazy]: /[a-z]+/ "end"', []),
        ('start: "a"i "b"', []),
    ],
)  # fmt: skip
def test_terminals_that_swallow_are_named(source: str, pairs: list[tuple[str, str]]) -> None:
    found = swallowing_terminals(source)
    assert len(found) == len(pairs), found
    for (one, other), warning in zip(pairs, found, strict=True):
        what = "it:" if one == other else f"{one}:"
        assert warning.startswith(f"terminal {other} may swallow what follows {what}")


def test_a_warning_comes_with_the_grammar() -> None:
    compiled = compile_grammar(GrammarSpec("ebnf", 'start: WORD "end"\nWORD: /[a-z]+/'))
    assert compiled.lark and any("terminal WORD" in warning for warning in compiled.warnings)
