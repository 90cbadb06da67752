"""The grammar IR before compilation: rules over expressions.

Expressions are regular operators over code points, and references to rules. A grammar without
recursion other than at a rule's very end is regular and becomes a DFA (`regular/`); any other goes
to a parser (`pushdown.py`). `And` and `Not` take regular operands only.

    rules: root -> "[" item ("," item)* "]"        Concat(Literal, Ref, Repeat(Concat(..)), Literal)
           item -> /[0-9]+/ | root                 Alt(Repeat(Chars), Ref)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # never in a text


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text; "" is the empty word. No lone surrogates."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One code point of a set: ascending, disjoint, inclusive ranges without surrogates."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """The parts one after another."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one of the parts; none: the empty language."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` at least `least` times and at most `most` times; None: unbounded."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class And:
    """Texts that all parts match. Regular parts only."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """Every text (of Unicode scalar values) that the part does not match. A regular part only."""

    part: Expression


@dataclass(frozen=True, slots=True)
class Ref:
    """The texts of the rule with this name."""

    name: str


Expression: TypeAlias = Literal | Chars | Concat | Alt | Repeat | And | Not | Ref

EMPTY_WORD = Literal("")
NOTHING = Alt(())


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by name; the language is that of `start`."""

    rules: Mapping[str, Expression]
    start: str = "root"

    @classmethod
    def of(cls, expression: Expression) -> Grammar:
        """A grammar of one rule."""
        return cls({"root": expression})


def concat(*parts: Expression) -> Expression:
    """Parts one after another, flattened; neighbouring literals are joined."""
    flat: list[Expression] = []
    text = ""  # of the literals since the last other part
    for part in _flattened(parts, Concat):
        if type(part) is Literal:
            text += part.text
            continue
        if type(part) is Alt and not part.parts:
            return NOTHING
        if text:
            flat.append(Literal(text))
            text = ""
        flat.append(part)
    if text:
        flat.append(Literal(text))
    if not flat:
        return EMPTY_WORD
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def alt(*parts: Expression) -> Expression:
    """Any of the parts, flattened, without duplicates."""
    if len(parts) == 1:
        return parts[0]
    flat = tuple(_flattened(parts, Alt))
    if len(flat) > 1:
        flat = tuple(dict.fromkeys(flat))  # hashes whole trees
    return flat[0] if len(flat) == 1 else Alt(flat)


def repeat(part: Expression, least: int, most: int | None = None) -> Expression:
    """`part` from `least` to `most` times, `most` >= `least`; the trivial cases are simplified."""
    if most == 0 or part == EMPTY_WORD:
        return EMPTY_WORD
    if part == NOTHING:
        return EMPTY_WORD if least == 0 else NOTHING
    return part if (least, most) == (1, 1) else Repeat(part, least, most)


def optional(part: Expression) -> Expression:
    """The part or the empty text."""
    return repeat(part, 0, 1)


def _flattened(parts: Iterable[Expression], kind: type[Concat] | type[Alt]) -> Iterable[Expression]:
    for part in parts:
        if type(part) is kind:
            yield from part.parts
        else:
            yield part
