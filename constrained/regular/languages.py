"""Questions about the languages of expressions without rules: empty, disjoint, contained, finite.

Each is answered by an automaton, and remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from ..grammar import And, Expression, Grammar, Literal, Not
from .build import build_dfa
from .dfa import DEAD, Dfa

MAX_REMEMBERED = 4096


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def is_empty(expression: Expression) -> bool:
    """Whether no text matches. Raises TooManyStates, as all here."""
    return _dfa(expression).is_empty


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def intersects(a: Expression, b: Expression) -> bool:
    """Whether some text matches both."""
    if isinstance(a, Literal) and isinstance(b, Literal):
        return a == b
    return not is_empty(And((a, b)))


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def is_subset(a: Expression, b: Expression) -> bool:
    """Whether every text of `a` is one of `b`."""
    return a == b or is_empty(And((a, Not(b))))


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def finite_words(expression: Expression, limit: int) -> tuple[str, ...] | None:
    """All texts, in the order of their UTF-8 bytes; None where they are more than `limit`."""
    words: list[str] = []
    for word in _words(_dfa(expression)):
        if word is None or len(words) == limit:
            return None
        words.append(word.decode())
    return tuple(words)


def _dfa(expression: Expression) -> Dfa:
    return build_dfa(Grammar.of(expression))


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
