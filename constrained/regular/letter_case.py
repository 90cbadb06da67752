"""Sets of code points whose case is ignored: simple case folding, as Python's `re` has it."""

from __future__ import annotations

import functools

from .charsets import Ranges, code_points, contains, normalized, union
from .unicode_classes import may_have_case


@functools.lru_cache(maxsize=1024)
def ignoring_case(ranges: Ranges) -> Ranges:
    """The set with every code point whose simple case folding equals that of a member."""
    variants = case_variants().items()
    found = (others for code, others in variants if contains(ranges, code))
    return union(ranges, normalized((other, other) for others in found for other in others))


@functools.cache
def case_variants() -> dict[int, tuple[int, ...]]:
    """For each code point that has any: all others with equal simple case folding."""
    folded: dict[str, list[int]] = {}
    for code in code_points(may_have_case()):
        folded.setdefault(_simple_folding(chr(code)), []).append(code)
    return {
        code: tuple(other for other in codes if other != code)
        for codes in folded.values()
        if len(codes) > 1
        for code in codes
    }


def _simple_folding(character: str) -> str:
    for folding in (character.casefold(), character.lower()):
        if len(folding) == 1:
            return folding
    return character
