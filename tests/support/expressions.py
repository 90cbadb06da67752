"""Random expressions, and a matcher for them that shares no code with automata."""

from __future__ import annotations

from hypothesis import strategies as st

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
from stemma.constrained.regular.charsets import ALL, complement, normalized

ALPHABET = "abé😀"

_literals = st.text(ALPHABET, max_size=3).map(Literal)
_chars = st.sampled_from(
    [
        Chars(()),
        Chars(ALL),
        Chars(((97, 98),)),
        Chars(complement(((97, 97),))),
        Chars(normalized((ord(c), ord(c)) for c in "aé")),
        Chars(normalized((97 + 2 * i, 97 + 2 * i) for i in range(12))),
        Chars(((0x80, 0x10FF), (0xE000, 0x1F600))),
    ]
)


def _wider(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    parts = st.lists(inner, max_size=3).map(tuple)
    counts = st.tuples(st.integers(0, 3), st.none() | st.integers(0, 2))
    return st.one_of(
        parts.map(Concat),
        parts.map(Alt),
        parts.map(And),
        inner.map(Not),
        st.builds(
            lambda part, n: Repeat(part, n[0], None if n[1] is None else n[0] + n[1]), inner, counts
        ),
    )


expressions = st.recursive(_literals | _chars, _wider, max_leaves=8)
texts = st.text(ALPHABET, max_size=6)


@st.composite
def tail_recursive_grammars(draw: st.DrawFn) -> Grammar:
    """Rules that refer to themselves and to each other only at their ends."""
    names = ["root", "one", "two"]
    end = st.sampled_from([*map(Ref, names), Literal("")])
    ending = st.builds(lambda first, last: Concat((first, last)), expressions, end)
    bodies = st.lists(ending, min_size=1, max_size=3).map(lambda parts: Alt(tuple(parts)))
    return Grammar({name: draw(bodies) for name in names})


def ends(expression: Expression, text: str, start: int) -> set[int]:
    """Where a match that begins at `start` may end; for expressions without rules."""
    match expression:
        case Literal(word):
            return {start + len(word)} if text.startswith(word, start) else set()
        case Chars(ranges):
            is_in = start < len(text) and any(a <= ord(text[start]) <= b for a, b in ranges)
            return {start + 1} if is_in else set()
        case Concat(parts):
            found = {start}
            for part in parts:
                found = {end for at in found for end in ends(part, text, at)}
            return found
        case Alt(parts):
            return {end for part in parts for end in ends(part, text, start)}
        case And(parts):
            found = set(range(start, len(text) + 1))
            for part in parts:
                found &= ends(part, text, start)
            return found
        case Not(part):
            return set(range(start, len(text) + 1)) - ends(part, text, start)
        case Repeat(part, least, most):
            return _repeated_ends(part, least, most, text, start)
    raise TypeError(expression)


def _repeated_ends(
    part: Expression, least: int, most: int | None, text: str, start: int
) -> set[int]:
    found, at = set(), {start}
    for turn in range(least + len(text) + 1 if most is None else most + 1):
        if turn >= least:
            found |= at
        at = {end for begin in at for end in ends(part, text, begin)}
    return found
