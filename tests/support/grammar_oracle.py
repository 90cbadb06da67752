"""Whether a grammar matches a text, by the definition: the reference for fast paths.

Memoised by (part, position): the set of positions where the part can end. No left recursion.
"""

from __future__ import annotations

import sys

from stemma.constrained.grammar import (
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
)


def grammar_matches(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is in the grammar's language."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))
    try:
        return len(text) in _Oracle(grammar, text).ends(Ref(grammar.start), 0)
    finally:
        sys.setrecursionlimit(limit)


class _Oracle:
    def __init__(self, grammar: Grammar, text: str) -> None:
        self.grammar = grammar
        self.text = text
        self.memo: dict[tuple[object, int], frozenset[int]] = {}

    def ends(self, part: Expression, start: int) -> frozenset[int]:
        key = (part.name if isinstance(part, Ref) else id(part), start)
        if key not in self.memo:
            self.memo[key] = frozenset(self._ends(part, start))
        return self.memo[key]

    def _ends(self, part: Expression, start: int) -> set[int] | frozenset[int]:
        match part:
            case Literal(text):
                return {start + len(text)} if self.text.startswith(text, start) else set()
            case Chars(ranges):
                code = ord(self.text[start]) if start < len(self.text) else -1
                return {start + 1} if any(a <= code <= b for a, b in ranges) else set()
            case Concat(parts):
                ends = {start}
                for inner in parts:
                    ends = {end for begin in ends for end in self.ends(inner, begin)}
                return ends
            case Alt(parts):
                return {end for inner in parts for end in self.ends(inner, start)}
            case Repeat(inner, least, most):
                return self._repeated(inner, least, most, start)
            case And(parts):
                return frozenset.intersection(*(self.ends(inner, start) for inner in parts))
            case Not(inner):
                return set(range(start, len(self.text) + 1)) - self.ends(inner, start)
            case Ref(name):
                return self.ends(self.grammar.rules[name], start)

    def _repeated(self, inner: Expression, least: int, most: int | None, start: int) -> set[int]:
        """Positions after k rounds, for k up to `most` or until rounds add no progress."""
        ends, reached = {start}, ({start} if least == 0 else set())
        for count in range(1, len(self.text) - start + least + 2):
            if not ends or (most is not None and count > most):
                break
            ends = {end for begin in ends for end in self.ends(inner, begin)}
            if count >= least:
                reached |= ends
        return reached
