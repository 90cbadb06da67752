"""Constraints on a string, and its language over characters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

from ...errors import InvalidGrammar
from ..grammar import Alt, And, Expression, Literal, Not, Repeat, alt
from ..regular.languages import is_known_empty
from ..regular.membership import matches
from ..regular.regex_parser import parse_regex
from .formats import format_expression
from .json_text import ANY_CHAR, ANY_JSON_STRING, ANY_TEXT, encoded, json_string

# read differently by ECMA-262 and Python's re, and Python's reading is not simply the wider one
_DIFFERS = re.compile(r"[.$]|\\[dDwWsSbB]|\(\?[a-z]*m|\[\^?\]|\{,\d*\}")
_IS_NOT_WIDER = re.compile(
    r"\\[DWsSbB]|\(\?[a-z]*m|\(\?<?!|\[\^(?:[^\]\\]|\\[^dw])*\\[dw]|\[\^?\]|\{,\d*\}"
)


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """Strings as an expression over characters; compared by identity, since expressions are large.
    Make only one per pattern or format.

    `widest` is used for exclusion: it includes strings that only one reading of the pattern has."""

    expression: Expression
    wider: Expression | None = None

    @property
    def widest(self) -> Expression:
        return self.expression if self.wider is None else self.wider

    def has(self, text: str) -> bool:
        """Whether a text is in it, by every reading."""
        return matches(self.expression, text)

    def may_have(self, text: str) -> bool:
        """Whether a text is in it, by some reading."""
        return matches(self.widest, text)


@lru_cache(maxsize=1024)
def pattern_language(pattern: str) -> Language:
    """The strings in which a regex is found, by ECMA-262 and also by Python validators, which use
    `re`. Raises InvalidGrammar."""
    ecma = parse_regex(pattern, anchored=False)
    if not _DIFFERS.search(pattern):
        return Language(ecma)
    try:
        python = parse_regex(pattern, dialect="python", anchored=False)
    except InvalidGrammar:  # invalid in Python: there is one reading
        return Language(ecma)
    if _IS_NOT_WIDER.search(pattern):
        return Language(And((ecma, python)), Alt((ecma, python)))
    return Language(ecma, python)


@lru_cache(maxsize=1024)
def ecma_language(pattern: str) -> Language:
    """The strings in which a regex is found, by ECMA-262. Raises InvalidGrammar."""
    return Language(parse_regex(pattern, anchored=False))


@cache
def format_language(name: str, is_whole: bool) -> Language | None:
    """See `formats.format_expression`."""
    expression = format_expression(name, is_whole)
    return None if expression is None else Language(expression)


@dataclass(frozen=True, slots=True)
class StringCase:
    """A conjunction of constraints on a string. Lengths in code points."""

    least: int = 0
    most: int | None = None
    includes: frozenset[Language] = frozenset()
    excludes: frozenset[Language] = frozenset()
    values: frozenset[str] | None = None

    def admits(self, text: str) -> bool:
        """Whether the case allows a text."""
        return (
            self.least <= len(text)
            and (self.most is None or len(text) <= self.most)
            and (self.values is None or text in self.values)
            and all(part.has(text) for part in self.includes)
            and not any(part.may_have(text) for part in self.excludes)
        )

    def merged(self, other: StringCase) -> StringCase | None:
        """Both conjunctions; None where plainly no string remains."""
        if self.values is not None or other.values is not None:
            candidates = other.values if self.values is None else self.values
            values = frozenset(t for t in candidates or () if self.admits(t) and other.admits(t))
            return StringCase(values=values) if values else None
        most = self.most if other.most is None else other.most
        if self.most is not None and other.most is not None:
            most = min(self.most, other.most)
        case = StringCase(
            max(self.least, other.least),
            most,
            self.includes | other.includes,
            self.excludes | other.excludes,
        )
        is_void = most is not None and case.least > most
        return None if is_void or case.includes & case.excludes else case


ANY = StringCase()


def of_lengths(least: int, most: int | None) -> list[StringCase]:
    """Strings with a length in [least, most]."""
    return [StringCase(least, most)] if most is None or least <= most else []


def negation_of_lengths(least: int, most: int | None) -> list[StringCase]:
    """Strings of any other length."""
    shorter = [StringCase(most=least - 1)] if least > 0 else []
    return shorter + ([StringCase(most + 1)] if most is not None else [])


def not_of_values(values: list[str]) -> StringCase:
    """None of these strings. Raises InvalidGrammar for invalid Unicode."""
    for value in values:
        encoded(value)
    return StringCase(excludes=frozenset({Language(alt(*map(Literal, values)))}))


def characters(case: StringCase, *, by_any_reading: bool = False) -> Expression:
    """The strings of a case before JSON encoding; () is empty."""
    if case.values is not None:
        return alt(*map(Literal, sorted(case.values)))
    parts = [part.widest if by_any_reading else part.expression for part in case.includes]
    if case.least or case.most is not None:
        parts.append(Repeat(ANY_CHAR, case.least, case.most))
    parts += [Not(part.expression if by_any_reading else part.widest) for part in case.excludes]
    if not parts:
        return ANY_TEXT
    if len(parts) == 1:
        return parts[0]
    whole = And(tuple(parts))
    return Alt(()) if is_known_empty(whole) else whole


@lru_cache(maxsize=2048)
def json_texts(case: StringCase) -> Expression:
    """Their JSON texts: canonical ones; every spelling where nothing is constrained."""
    if case == ANY:
        return ANY_JSON_STRING
    if case.values is not None:
        return alt(*(Literal(encoded(text)) for text in sorted(case.values)))
    return json_string(characters(case))
