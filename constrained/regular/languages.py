"""Questions about the languages of expressions without rules: empty, disjoint, contained, finite.

Each is answered by an automaton, and remembered. Raise TooManyStates where there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..grammar import And, Expression, Grammar, Literal, Not
from .build import build_dfa
from .dfa import DEAD, Dfa
from .flat_grammar import flat_grammar

MAX_REMEMBERED = 4096


def is_empty(expression: Expression) -> bool:
    """Whether no text matches."""
    return _is_empty(_Question.of(expression))


def intersects(a: Expression, b: Expression) -> bool:
    """Whether some text matches both."""
    if isinstance(a, Literal) and isinstance(b, Literal):
        return a.text == b.text
    return not is_empty(And((a, b)))


def is_subset(a: Expression, b: Expression) -> bool:
    """Whether every text of `a` is one of `b`."""
    return a is b or is_empty(And((a, Not(b))))


def finite_words(expression: Expression, limit: int) -> tuple[str, ...] | None:
    """All texts, in the order of their UTF-8 bytes; None where they are more than `limit`."""
    return _finite_words(_Question.of(expression), limit)


@dataclass(frozen=True, slots=True)
class _Question:
    """An expression known by its flat form: its parts may be deep, or shared many times over."""

    form: bytes
    expression: Expression = field(compare=False)

    @classmethod
    def of(cls, expression: Expression) -> _Question:
        return cls(flat_grammar(Grammar.of(expression)).words.tobytes(), expression)

    def dfa(self) -> Dfa:
        return build_dfa(Grammar.of(self.expression))


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _is_empty(question: _Question) -> bool:
    return question.dfa().is_empty


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _finite_words(question: _Question, limit: int) -> tuple[str, ...] | None:
    words: list[str] = []
    for word in _words(question.dfa()):
        if word is None or len(words) == limit:
            return None
        words.append(word.decode())
    return tuple(words)


def _words(dfa: Dfa) -> Iterator[bytes | None]:
    """Depth first; None where a state is met again on the way to it: then they are infinite."""
    if dfa.is_empty:
        return
    path, states, next_bytes = bytearray(), [dfa.start], [0]
    if dfa.accepting[dfa.start]:
        yield b""
    while states:
        row = dfa.transitions[states[-1], dfa.class_of[next_bytes[-1] :]]
        alive = np.flatnonzero(row != DEAD)
        if not len(alive):
            states.pop()
            next_bytes.pop()
            del path[-1:]
            continue
        byte = next_bytes[-1] + int(alive[0])
        target = int(row[alive[0]])
        if target in states:
            yield None
        next_bytes[-1] = byte + 1
        path.append(byte)
        states.append(target)
        next_bytes.append(0)
        if dfa.accepting[target]:
            yield bytes(path)
