"""Constraints on a number, and its canonical texts.

Numbers compare by value: 1 and 1.0 are equal. Texts: integers without fraction; other numbers with
one; an exponent only in unconstrained numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import floor, lcm
from typing import Any

from ..grammar import EMPTY_WORD, Chars, Expression, Literal, Ref, alt, concat, optional, repeat
from .keywords import Dialect
from .number_text import (
    DIGIT,
    NON_ZERO,
    Interval,
    decimal_places,
    digits_of,
    integers,
    natural_blocks,
    non_integers,
    number_literal,
    reals,
    signed,
)

MAX_MODULUS = 1000
MAX_ENUMERATED = 1000
MAX_PLACES = 4  # of a multiple with bounds: the fractions at the bounds are written out

_ALL = Interval()
_EXPONENT = concat(
    Chars(((69, 69), (101, 101))), optional(Chars(((43, 43), (45, 45)))), repeat(DIGIT, 1)
)
ANY_NUMBER = concat(
    optional(Literal("-")),
    alt(Literal("0"), concat(NON_ZERO, repeat(DIGIT, 0))),
    optional(concat(Literal("."), repeat(DIGIT, 1))),
    optional(_EXPONENT),
)
"""Every number of JSON."""


@dataclass(frozen=True, slots=True)
class NumberCase:
    """A conjunction of constraints on a number; an integer is a multiple of 1."""

    interval: Interval = _ALL
    step: Fraction | None = None
    not_steps: frozenset[Fraction] = frozenset()
    values: frozenset[Fraction] | None = None
    excluded: frozenset[Fraction] = frozenset()

    def admits(self, value: Fraction) -> bool:
        """Whether the case allows a number."""
        return (
            self.interval.meets(value)
            and (self.step is None or (value / self.step).denominator == 1)
            and all((value / step).denominator != 1 for step in self.not_steps)
            and value not in self.excluded
            and (self.values is None or value in self.values)
        )

    def merged(self, other: NumberCase) -> NumberCase | None:
        """Both conjunctions; None where no number remains."""
        case = NumberCase(
            self.interval.intersection(other.interval),
            _common_multiple(self.step, other.step),
            self.not_steps | other.not_steps,
            self.values if other.values is None else other.values,
            self.excluded | other.excluded,
        )
        if self.values is not None or other.values is not None:
            values = frozenset(
                v for v in self.values or other.values or () if self.admits(v) and other.admits(v)
            )
            return NumberCase(values=values) if values else None
        return None if case._is_void() else case

    def _is_void(self) -> bool:
        if self.interval.is_empty:
            return True
        step = self.step
        return step is not None and any((step / n).denominator == 1 for n in self.not_steps)


ANY = NumberCase()
INTEGER = NumberCase(step=Fraction(1))
NOT_INTEGER = NumberCase(not_steps=frozenset({Fraction(1)}))


def exact(number: int | float) -> Fraction:
    """The decimal as which the schema's number was written."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def of_values(values: list[int | float]) -> NumberCase | None:
    """One of these numbers."""
    return NumberCase(values=frozenset(map(exact, values))) if values else None


def not_of_values(values: list[int | float]) -> NumberCase:
    """None of these numbers."""
    return NumberCase(excluded=frozenset(map(exact, values)))


def asked(schema: dict[str, Any], dialect: Dialect) -> list[NumberCase]:
    """The constraint of each keyword for numbers, one case per keyword."""
    cases = [NumberCase(interval) for interval in _bounds(schema, dialect)]
    if "multipleOf" in schema:
        cases.append(NumberCase(step=exact(schema["multipleOf"])))
    return cases


def negation(case: NumberCase) -> NumberCase | None:
    """The numbers that violate one keyword's constraint; None where none do."""
    if case.step is not None:
        return NumberCase(not_steps=frozenset({case.step}))
    interval = case.interval
    if interval.low is not None:
        return NumberCase(Interval(high=interval.low, has_high=not interval.has_low))
    return NumberCase(Interval(low=interval.high, has_low=not interval.has_high))


def _bounds(schema: dict[str, Any], dialect: Dialect) -> list[Interval]:
    bounds = []
    for name, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        is_low = name == "minimum"
        is_strict = dialect == Dialect.DRAFT4 and schema.get(strict) is True
        if name in schema:
            bounds.append(_bound(schema[name], is_low, not is_strict))
        if strict in schema and not isinstance(schema[strict], bool):
            bounds.append(_bound(schema[strict], is_low, False))
    return bounds


def _bound(number: int | float, is_low: bool, belongs: bool) -> Interval:
    end = exact(number)
    return Interval(low=end, has_low=belongs) if is_low else Interval(high=end, has_high=belongs)


def _common_multiple(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    if one is None or other is None or one == other:
        return other if one is None else one
    denominator = lcm(one.denominator, other.denominator)
    return Fraction(lcm(int(one * denominator), int(other * denominator)), denominator)


class TooManyRemainders(Exception):
    """`multipleOf` would need more rules than are allowed."""


def expression(case: NumberCase, add_rule: Callable[[str, Expression], None]) -> Expression:
    """Canonical texts of a case's numbers. Remainders become rules, and then so do the numbers as a
    whole, so that a parser's tokens can be told apart. Raises TooManyRemainders."""
    if case == ANY:
        return ANY_NUMBER
    if case.values is not None:
        texts = [number_literal(value) for value in sorted(case.values)]
        return alt(*(Literal(text) for text in texts if text is not None))
    parts = case.interval.without(list(case.excluded))
    rules: dict[str, Expression] = {}
    whole = alt(*(_within(part, case, rules.__setitem__) for part in parts))
    if not rules:
        return whole
    first = f"number_{abs(hash(case)):x}"
    for name, rule in (*rules.items(), (first, whole)):
        add_rule(name, rule)
    return Ref(first)


def _within(
    part: Interval, case: NumberCase, add_rule: Callable[[str, Expression], None]
) -> Expression:
    if not case.not_steps:
        if case.step is None:
            return reals(part)
        if case.step == 1:
            return integers(part)
    elif case.step is None and case.not_steps == {1}:
        return non_integers(part)
    return _enumerated(part, case) or _Multiples(case, add_rule).texts(part)


def _enumerated(part: Interval, case: NumberCase) -> Expression | None:
    """The multiples in an interval one by one, where they are few."""
    step = case.step
    if step is None or part.low is None or part.high is None:
        return None
    first, last = part.least_multiple(step), part.greatest_multiple(step)
    if first is None or last is None or last - first >= MAX_ENUMERATED:
        return None
    texts = [number_literal(n * step) for n in range(first, last + 1) if case.admits(n * step)]
    return alt(*(Literal(text) for text in texts if text is not None))


class _Multiples:
    """Numbers by their remainder: one rule for each remainder of the digits read so far.

    With at most k places after the point, a number N / 10^k is judged by N modulo `modulus`.
    """

    def __init__(self, case: NumberCase, add_rule: Callable[[str, Expression], None]) -> None:
        self.case = case
        self.add_rule = add_rule
        steps = [*case.not_steps, *([case.step] if case.step is not None else [])]
        places = [decimal_places(step) for step in steps]
        self.places = max(0 if count is None else count for count in places)
        common: Fraction | None = None
        for step in steps:
            common = _common_multiple(common, step)
        assert common is not None, "no multiple is asked for"
        self.is_open = case.step is None  # more places than k are not multiples: allowed
        if case.step is not None and case.step.denominator == 1:
            self.places, common = 0, _common_multiple(common, case.step)
        scaled = (common or Fraction(1)) * 10**self.places
        self.modulus = scaled.numerator if scaled.denominator == 1 else 0
        if not 0 < self.modulus <= MAX_MODULUS:
            raise TooManyRemainders(
                f"multiples of {common} need {scaled} remainders, more than {MAX_MODULUS}"
            )
        self.name = f"multiple_{abs(hash((case.step, case.not_steps))):x}"
        self._added: set[str] = set()
        self._queue: list[tuple[str, Callable[[], Expression]]] = []

    def texts(self, part: Interval) -> Expression:
        texts = signed(part, self._magnitudes)
        while self._queue:
            name, write = self._queue.pop()
            self.add_rule(name, write())
        return texts

    def _magnitudes(self, part: Interval) -> Expression:
        if self.places == 0 and not self.is_open:
            return self._naturals(part)
        if part.low == 0 and part.has_low and part.high is None:
            return self._naturals(part)
        if self.places > MAX_PLACES:
            raise TooManyRemainders(f"multiples with {self.places} places between bounds")
        first = floor(part.low or 0)
        last = None if part.high is None else floor(part.high)
        wholes = [first] if last in (None, first) else [first, last]
        inner = Interval(Fraction(first + 1), None if last is None else Fraction(last - 1))
        ends = [self._fractions_of(whole, part) for whole in wholes if whole is not None]
        return alt(*ends, self._naturals(inner))

    def _fractions_of(self, whole: int, part: Interval) -> Expression:
        """The numbers of an interval with this integer part, one by one or between gaps."""
        scale = 10**self.places
        unit = Interval(Fraction(whole), Fraction(whole + 1), has_high=False).intersection(part)
        values = [whole * scale + digits for digits in range(scale)]
        if self.is_open:
            gaps = [Fraction(v, scale) for v in values if not self._is_accepted(v)]
            return alt(*map(reals, unit.without(gaps)))
        accepted = [Fraction(v, scale) for v in values if self._is_accepted(v)]
        texts = [number_literal(value) for value in accepted if unit.meets(value)]
        return alt(*(Literal(text) for text in texts if text is not None))

    def _naturals(self, part: Interval) -> Expression:
        """Integer parts of an interval, digit by digit, then what may follow."""
        parts = []
        for prefix, free, is_open in natural_blocks(part):
            remainder = int(prefix) % self.modulus
            parts.append(concat(Literal(prefix), self._whole(remainder, free, is_open)))
        return alt(*parts)

    def _whole(self, remainder: int, free: int, is_open: bool) -> Expression:
        """`free` digits of the integer part, more where it is open, then the fraction."""
        if free == 0 and not is_open:
            return self._fraction(remainder, 0)

        def write() -> Expression:
            end = [self._fraction(remainder, 0)] if free == 0 else []
            return alt(
                self._by_digit(remainder, lambda r: self._whole(r, max(free - 1, 0), is_open)),
                *end,
            )

        return self._rule(f"{remainder}_{free}{'_on' if is_open else ''}", write)

    def _fraction(self, remainder: int, read: int) -> Expression:
        """Nothing, or the point and digits, after `read` digits of the fraction."""
        left = self.places - read
        is_accepted = self._is_accepted(remainder * 10**left)
        end = [EMPTY_WORD] if is_accepted else []
        if left == 0 and not self.is_open:
            return alt(*end)

        def write() -> Expression:
            if left == 0:
                follow = _beyond(is_accepted)
            else:
                follow = self._by_digit(remainder, lambda r: self._fraction(r, read + 1))
            return alt(*end, concat(EMPTY_WORD if read else Literal("."), follow))

        return self._rule(f"{remainder}_after_{read}", write)

    def _rule(self, suffix: str, write: Callable[[], Expression]) -> Ref:
        """A rule, written from a queue: there may be more of them than a stack is deep."""
        name = f"{self.name}_{suffix}"
        if name not in self._added:
            self._added.add(name)
            self._queue.append((name, write))
        return Ref(name)

    def _by_digit(self, remainder: int, follow: Callable[[int], Expression]) -> Expression:
        """One more digit; digits with the same remainder are one set."""
        after = sorted(((remainder * 10 + d) % self.modulus, 48 + d) for d in range(10))
        return alt(
            *(
                concat(digits_of([code for _, code in group]), follow(r))
                for r, group in groupby(after, key=lambda pair: pair[0])
            )
        )

    def _is_accepted(self, scaled: int) -> bool:
        value = Fraction(scaled, 10**self.places)
        case = self.case
        return (case.step is None or (value / case.step).denominator == 1) and all(
            (value / step).denominator != 1 for step in case.not_steps
        )


def _beyond(is_accepted: bool) -> Expression:
    """Digits after the last place that matters: any, or some that are not all zeros."""
    if is_accepted:
        return repeat(DIGIT, 1)
    return concat(repeat(Literal("0"), 0), NON_ZERO, repeat(DIGIT, 0))
