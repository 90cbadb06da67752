"""Sets of code points, and their UTF-8 encodings as sequences of byte ranges.

A set is ascending, disjoint, inclusive ranges over the Unicode scalar values: no set contains
surrogates, so no automaton ever accepts invalid UTF-8.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from ..grammar import MAX_CODE_POINT, SURROGATES

Ranges: TypeAlias = tuple[tuple[int, int], ...]
ByteRanges: TypeAlias = tuple[tuple[int, int], ...]

ALL: Ranges = ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, MAX_CODE_POINT))


def normalized(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending, disjoint, merged where they touch, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def of_text(characters: str) -> Ranges:
    """The set of these characters."""
    return normalized((ord(character), ord(character)) for character in characters)


def union(*sets: Ranges) -> Ranges:
    """The union of the sets."""
    return normalized(one for ranges in sets for one in ranges)


def complement(ranges: Ranges) -> Ranges:
    """Every scalar value that is not in the set."""
    gaps, low = [], 0
    for first, last in ranges:
        gaps.append((low, first - 1))
        low = last + 1
    return normalized((*gaps, (low, MAX_CODE_POINT)))


def intersection(a: Ranges, b: Ranges) -> Ranges:
    """The intersection of both sets."""
    return complement(union(complement(a), complement(b)))


def difference(a: Ranges, b: Ranges) -> Ranges:
    """The code points in `a` and not in `b`."""
    return intersection(a, complement(b))


def code_points(ranges: Ranges) -> Iterator[int]:
    """The members, ascending."""
    for low, high in ranges:
        yield from range(low, high + 1)


def contains(ranges: Ranges, code_point: int) -> bool:
    """Whether the code point is in the set."""
    index = bisect.bisect_right(ranges, (code_point, MAX_CODE_POINT))
    return index > 0 and code_point <= ranges[index - 1][1]


def utf8_sequences(ranges: Ranges) -> Iterator[ByteRanges]:
    """Sequences of byte ranges that together accept exactly the encodings of the set.

    Each sequence is a product: any byte of the first range, then any of the second, .. (R. Cox,
    "Regular Expression Matching in the Wild", 2010, section on UTF-8).
    """
    pending = list(reversed(ranges))
    while pending:
        low, high = pending.pop()
        last = _end_of_first_product(low, high)
        if last < high:
            pending.append((last + 1, high))
        if last < high and _end_of_first_product(low, last) < last:
            pending.append((low, last))
        else:
            yield tuple(zip(chr(low).encode(), chr(last).encode()))


def _end_of_first_product(low: int, high: int) -> int:
    """Where to cut [low, high] so that equal lengths and whole continuation ranges remain."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return last
    if high <= 0x7F:
        return high
    for bits in (6, 12, 18):
        tail = (1 << bits) - 1
        if low >> bits != high >> bits:
            if low & tail:
                return low | tail
            if high & tail != tail:
                return (high & ~tail) - 1
    return high


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        for first, last in ALL:
            if max(low, first) <= min(high, last):
                yield max(low, first), min(high, last)
