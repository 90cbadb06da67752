"""Questions about the languages of expressions without rules: empty, finite.

Each is decided by a small automaton, and cached. Where that takes too many states the result is the
one that claims nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..grammar import Expression, Grammar
from .build import TooManyStates, build_dfa
from .dfa import DEAD, Dfa
from .flat_grammar import flat_grammar

MAX_REMEMBERED = 4096
MAX_STATES = 4000  # per question


def is_known_empty(expression: Expression) -> bool:
    """Whether the language was found to be empty."""
    return _is_known_empty(_Question.of(expression))


def finite_words(expression: Expression, limit: int) -> tuple[str, ...] | None:
    """All texts, in the order of their UTF-8 bytes; None where there are more than `limit`, or the
    question was too costly."""
    return _finite_words(_Question.of(expression), limit)


@dataclass(frozen=True, slots=True)
class _Question:
    """An expression identified by its flat form: its parts may be deep, or shared many times."""

    form: bytes
    expression: Expression = field(compare=False)

    @classmethod
    def of(cls, expression: Expression) -> _Question:
        return cls(flat_grammar(Grammar.of(expression)).words.tobytes(), expression)

    def dfa(self) -> Dfa | None:
        try:
            return build_dfa(Grammar.of(self.expression), max_states=MAX_STATES)
        except TooManyStates:
            return None


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _is_known_empty(question: _Question) -> bool:
    dfa = question.dfa()
    return dfa is not None and dfa.is_empty


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _finite_words(question: _Question, limit: int) -> tuple[str, ...] | None:
    dfa = question.dfa()
    if dfa is None:
        return None
    words: list[str] = []
    for word in _words(dfa):
        if word is None or len(words) == limit:
            return None
        words.append(word.decode())
    return tuple(words)


def _words(dfa: Dfa) -> Iterator[bytes | None]:
    """Depth first; None where a state leads back to itself: then the words are infinite."""
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
