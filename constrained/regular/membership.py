"""Tests whether a text is in a regular language, directly on the expression.

For single short words (names against patterns, values against lengths), where building an
automaton would cost more. Cost: positions in the text times nodes of the expression.
"""

from __future__ import annotations

from ..grammar import Alt, And, Chars, Concat, Expression, Literal, Not, Ref, Repeat


def matches(expression: Expression, text: str) -> bool:
    """Whether the whole text is in the language; the expression has no rules."""
    return len(text) in _Ends(text).of(expression, 0)


class _Ends:
    """In one text, where a part can end, by where it begins."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[tuple[int, int], frozenset[int]] = {}

    def of(self, part: Expression, start: int) -> frozenset[int]:
        key = (id(part), start)
        if key not in self._found:
            self._found[key] = frozenset(self._of(part, start))
        return self._found[key]

    def _of(self, part: Expression, start: int) -> set[int] | frozenset[int]:
        match part:
            case Literal(text):
                return {start + len(text)} if self.text.startswith(text, start) else set()
            case Chars(ranges):
                code = ord(self.text[start]) if start < len(self.text) else -1
                return {start + 1} if any(a <= code <= b for a, b in ranges) else set()
            case Concat(parts):
                ends = {start}
                for inner in parts:
                    ends = {end for begin in ends for end in self.of(inner, begin)}
                return ends
            case Alt(parts):
                return {end for inner in parts for end in self.of(inner, start)}
            case And(parts):
                return frozenset.intersection(*(self.of(inner, start) for inner in parts))
            case Not(inner):
                return set(range(start, len(self.text) + 1)) - self.of(inner, start)
            case Repeat(inner, least, most):
                return self._repeated(inner, least, most, start)
            case Ref(name):
                raise AssertionError(f"rule {name} in a regular expression")

    def _repeated(self, inner: Expression, least: int, most: int | None, start: int) -> set[int]:
        """Repeat until the set of ends recurs: after that nothing new can be reached."""
        ends = {start}
        reached = set(ends) if least == 0 else set()
        seen: set[frozenset[int]] = set()
        rounds = 0
        while ends and (most is None or rounds < most):
            ends = {end for begin in ends for end in self.of(inner, begin)}
            rounds += 1
            if rounds >= least:
                reached |= ends
                if frozenset(ends) in seen:
                    break
                seen.add(frozenset(ends))
        return reached
