"""What is asked of a string, and its language over characters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from ..grammar import Alt, And, Expression, Literal, Not, Repeat, alt
from ..regular.languages import is_known_empty
from ..regular.regex_parser import parse_regex
from .formats import format_expression
from .json_text import ANY_CHAR, ANY_JSON_STRING, ANY_TEXT, encoded, json_string
from .membership import matches


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """Strings as an expression over characters; compared by identity, since expressions are large.
    Whoever makes one for a pattern or a format makes it once."""

    expression: Expression

    def has(self, text: str) -> bool:
        return matches(self.expression, text)


@lru_cache(maxsize=1024)
def pattern_language(pattern: str) -> Language:
    """The strings in which a regex is found. Raises InvalidGrammar."""
    return Language(parse_regex(pattern, anchored=False))


@cache
def format_language(name: str, is_negated: bool) -> Language | None:
    """See `formats.format_expression`."""
    expression = format_expression(name, is_negated)
    return None if expression is None else Language(expression)


@dataclass(frozen=True, slots=True)
class StringCase:
    """A conjunction of what is asked of a string. Lengths in code points."""

    least: int = 0
    most: int | None = None
    includes: frozenset[Language] = frozenset()
    excludes: frozenset[Language] = frozenset()
    values: frozenset[str] | None = None

    def admits(self, text: str) -> bool:
        """Whether a text is among them."""
        return (
            self.least <= len(text)
            and (self.most is None or len(text) <= self.most)
            and (self.values is None or text in self.values)
            and all(part.has(text) for part in self.includes)
            and not any(part.has(text) for part in self.excludes)
        )

    def merged(self, other: StringCase) -> StringCase | None:
        """Both conjunctions; None where it is plain that no string is left."""
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
    """Strings of a length."""
    return [StringCase(least, most)] if most is None or least <= most else []


def negation_of_lengths(least: int, most: int | None) -> list[StringCase]:
    """Strings of any other length."""
    shorter = [StringCase(most=least - 1)] if least > 0 else []
    return shorter + ([StringCase(most + 1)] if most is not None else [])


def not_of_values(values: list[str]) -> StringCase:
    """None of these strings. Raises InvalidGrammar for one that is no Unicode text."""
    for value in values:
        encoded(value)
    return StringCase(excludes=frozenset({Language(alt(*map(Literal, values)))}))


def characters(case: StringCase) -> Expression:
    """The strings of a case, as they are before they are written as JSON; () is empty."""
    if case.values is not None:
        return alt(*map(Literal, sorted(case.values)))
    parts = [part.expression for part in case.includes]
    if case.least or case.most is not None:
        parts.append(Repeat(ANY_CHAR, case.least, case.most))
    parts += [Not(part.expression) for part in case.excludes]
    if not parts:
        return ANY_TEXT
    if len(parts) == 1:
        return parts[0]
    whole = And(tuple(parts))
    return Alt(()) if is_known_empty(whole) else whole


@lru_cache(maxsize=2048)
def json_texts(case: StringCase) -> Expression:
    """Their JSON texts: canonical ones, all of them where nothing is asked."""
    if case == ANY:
        return ANY_JSON_STRING
    if case.values is not None:
        return alt(*(Literal(encoded(text)) for text in sorted(case.values)))
    return json_string(characters(case))
