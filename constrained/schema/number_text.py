"""Digit-wise regular languages of decimal numbers: ranges and multiples, exact at any size.

Universe: `-?(0|[1-9][0-9]*)(\\.[0-9]+)?` without a negative zero; the value of a text is its
mathematical one. Where integers are required, a text without fraction is an integer's only
spelling. Multiples are right-linear rules, one per remainder, so that no automata are intersected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

from ..grammar import EMPTY_WORD, NOTHING, Chars, Expression, Literal, alt, concat, optional, repeat

DIGIT = Chars(((48, 57),))
NON_ZERO = Chars(((49, 57),))
_DIGITS = repeat(DIGIT, 0)
_FRACTION = concat(Literal("."), repeat(DIGIT, 1))
_NON_ZERO_FRACTION = concat(Literal("."), repeat(Literal("0"), 0), NON_ZERO, _DIGITS)


@dataclass(frozen=True, slots=True)
class Interval:
    """Values between two ends, None: unbounded; `has_low` and `has_high`: the end is included."""

    low: Fraction | None = None
    high: Fraction | None = None
    has_low: bool = True
    has_high: bool = True

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (
            self.low == self.high and not (self.has_low and self.has_high)
        )

    def meets(self, value: Fraction) -> bool:
        """Whether the value lies in it."""
        if self.low is not None and (value < self.low or (value == self.low and not self.has_low)):
            return False
        return self.high is None or value < self.high or (value == self.high and self.has_high)

    def intersection(self, other: Interval) -> Interval:
        low, has_low = _later((self.low, self.has_low), (other.low, other.has_low), 1)
        high, has_high = _later((self.high, self.has_high), (other.high, other.has_high), -1)
        return Interval(low, high, has_low, has_high)

    def without(self, values: list[Fraction]) -> list[Interval]:
        """The parts that remain between the values, in order."""
        parts, rest = [], self
        for value in sorted(values):
            if rest.meets(value):
                parts.append(Interval(rest.low, value, rest.has_low, False))
                rest = Interval(value, rest.high, False, rest.has_high)
        return [part for part in (*parts, rest) if not part.is_empty]

    def least_multiple(self, step: Fraction) -> int | None:
        """The least n for which n * step lies in it."""
        if self.low is None:
            return None
        quotient = self.low / step
        n = ceil(quotient)
        return n + 1 if n == quotient and not self.has_low else n

    def greatest_multiple(self, step: Fraction) -> int | None:
        """The greatest n for which n * step lies in it."""
        if self.high is None:
            return None
        quotient = self.high / step
        n = floor(quotient)
        return n - 1 if n == quotient and not self.has_high else n

    def mirrored(self) -> Interval:
        negated = [None if end is None else -end for end in (self.high, self.low)]
        return Interval(negated[0], negated[1], self.has_high, self.has_low)


def _later(
    one: tuple[Fraction | None, bool], other: tuple[Fraction | None, bool], sign: int
) -> tuple[Fraction | None, bool]:
    """The stricter of two ends; `sign` 1 for lower ends, -1 for upper ones."""
    if one[0] is None or other[0] is None:
        return other if one[0] is None else one
    if one[0] == other[0]:
        return one[0], one[1] and other[1]
    return one if (one[0] > other[0]) == (sign > 0) else other


POSITIVE = Interval(low=Fraction(0), has_low=False)
NOT_NEGATIVE = Interval(low=Fraction(0))


def number_literal(value: Fraction) -> str | None:
    """The canonical text of a value; None where it has no finite decimal one."""
    places = decimal_places(value)
    if places is None:
        return None
    scaled = abs(value.numerator) * (10**places // value.denominator)
    text = str(scaled).rjust(places + 1, "0")
    if places:
        text = f"{text[:-places]}.{text[-places:]}"
    return f"-{text}" if value < 0 else text


def decimal_places(value: Fraction) -> int | None:
    """Digits after the point; None where they never end."""
    denominator, twos, fives = value.denominator, 0, 0
    while denominator % 2 == 0:
        denominator, twos = denominator // 2, twos + 1
    while denominator % 5 == 0:
        denominator, fives = denominator // 5, fives + 1
    return max(twos, fives) if denominator == 1 else None


@lru_cache(maxsize=1024)
def integers(interval: Interval) -> Expression:
    """Texts of the integers in an interval."""
    return signed(interval, _natural_numbers)


@lru_cache(maxsize=1024)
def reals(interval: Interval) -> Expression:
    """Texts of all decimals in an interval."""
    return signed(interval, lambda part: _decimals(part, False))


@lru_cache(maxsize=1024)
def non_integers(interval: Interval) -> Expression:
    """Texts of the decimals in an interval that are not integers."""
    return signed(interval, lambda part: _decimals(part, True))


def signed(interval: Interval, texts: Callable[[Interval], Expression]) -> Expression:
    """Both signs, from the language of the numbers from 0 on; zero has no sign."""
    upper = interval.intersection(NOT_NEGATIVE)
    lower = interval.mirrored().intersection(POSITIVE)
    return alt(
        NOTHING if upper.is_empty else texts(upper),
        NOTHING if lower.is_empty else concat(Literal("-"), texts(lower)),
    )


def natural_blocks(interval: Interval) -> list[tuple[str, int, bool]]:
    """The integers from 0 on as blocks (prefix, free digits, whether more digits may follow)."""
    low = max(interval.least_multiple(Fraction(1)) or 0, 0)
    high = interval.greatest_multiple(Fraction(1))
    if high is not None:
        return [(prefix, free, False) for prefix, free in _blocks(low, high)]
    blocks = [(prefix, free, False) for prefix, free in _blocks(low, 10 ** len(str(low)) - 1)]
    return blocks + [(str(digit), len(str(low)), True) for digit in range(1, 10)]


def _natural_numbers(interval: Interval) -> Expression:
    """Integers from 0 on; blocks that differ only in their prefix's last digit become one part."""
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for prefix, free, is_open in natural_blocks(interval):
        groups.setdefault((prefix[:-1], free, is_open), []).append(ord(prefix[-1]))
    return alt(
        *(
            concat(Literal(head), digits_of(digits), repeat(DIGIT, free, None if is_open else free))
            for (head, free, is_open), digits in groups.items()
        )
    )


def digits_of(codes: list[int]) -> Expression:
    """One of these digits, by ascending code point."""
    if len(codes) == 1:
        return Literal(chr(codes[0]))
    ranges: list[tuple[int, int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return Chars(tuple(ranges))


def _blocks(low: int, high: int) -> list[tuple[str, int]]:
    """The numbers from `low` to `high` as prefixes with a fixed number of free digits."""
    blocks: list[tuple[str, int]] = []
    while low <= high:
        free, size = 0, 10
        while low and low % size == 0 and low + size - 1 <= high:
            free, size = free + 1, size * 10
        text = str(low)
        blocks.append((text[: len(text) - free], free))
        low += 10**free
    return blocks


def _decimals(part: Interval, is_non_integer: bool) -> Expression:
    """The integer parts at the ends, and those between with any fraction."""
    first = floor(part.low or 0)
    last = None if part.high is None else floor(part.high)
    ends = [first] if last in (None, first) else [first, last]
    inner = Interval(Fraction(first + 1), None if last is None else Fraction(last - 1))
    fraction = _NON_ZERO_FRACTION if is_non_integer else optional(_FRACTION)
    return alt(
        *(_within(whole, part, is_non_integer) for whole in ends if whole is not None),
        concat(_natural_numbers(inner), fraction),
    )


def _within(whole: int, part: Interval, is_non_integer: bool) -> Expression:
    """The decimals of an interval whose integer part is `whole`."""
    unit = Interval(Fraction(whole), Fraction(whole + 1), not is_non_integer, False)
    cut = unit.intersection(part)
    if cut.is_empty or cut.low is None or cut.high is None:
        return NOTHING
    low = _Digits(_fraction_digits(cut.low - whole), cut.has_low)
    high = (
        None if cut.high == whole + 1 else _Digits(_fraction_digits(cut.high - whole), cut.has_high)
    )
    start = None if low.text == "" and low.belongs else low
    fraction = concat(Literal("."), _fractions(start, high, False))
    if cut.meets(Fraction(whole)):
        fraction = optional(fraction)
    return concat(Literal(str(whole)), fraction)


@dataclass(frozen=True, slots=True)
class _Digits:
    """The remaining digits of an end, without trailing zeros."""

    text: str
    belongs: bool


def _fraction_digits(value: Fraction) -> str:
    text = number_literal(value)
    assert text is not None, "the ends of an interval are decimals"
    return text[2:]


def _fractions(low: _Digits | None, high: _Digits | None, may_end: bool) -> Expression:
    """Digit texts y with low <= 0.y <= high; None: that end no longer matters."""
    if low is None and high is None:
        return _DIGITS if may_end else repeat(DIGIT, 1)
    if low is not None and low.text == "" and low.belongs:
        return _fractions(None, high, may_end)
    if high is not None and high.text == "":
        return _zeros(low, high, may_end)
    if low is not None and low.text == "" and high is None:
        return concat(repeat(Literal("0"), 0), NON_ZERO, _DIGITS)
    first = int(low.text[:1] or "0") if low else 0
    last = int(high.text[0]) if high else 9
    parts = []
    for digit in range(first, last + 1):
        next_low = _Digits(low.text[1:], low.belongs) if low and digit == first else None
        next_high = _Digits(high.text[1:], high.belongs) if high and digit == last else None
        parts.append(concat(Literal(str(digit)), _fractions(next_low, next_high, True)))
    if may_end and low is None:  # zeros follow: below `high`, which has digits left
        parts.append(EMPTY_WORD)
    return alt(*parts)


def _zeros(low: _Digits | None, high: _Digits, may_end: bool) -> Expression:
    """The rest after all of `high` has been written: zeros only."""
    if low is not None or not high.belongs:
        return NOTHING
    return repeat(Literal("0"), 0 if may_end else 1)
