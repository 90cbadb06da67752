"""Formats amounts for people: times, counts and shares."""

from __future__ import annotations

ABSENT = "-"


def seconds(value: float | None) -> str:
    """Formatted with a unit that fits its size."""
    if value is None:
        return ABSENT
    if value >= 9.9995:
        return f"{value:.1f} s"
    return f"{value:.2f} s" if value >= 0.9995 else f"{value * 1000:.1f} ms"


def count(value: int | None) -> str:
    """Formatted with separators."""
    return ABSENT if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """Formats a share in [0, 1]."""
    return ABSENT if share is None else f"{share:.0%}"


def plural(num: int, word: str, words: str = "") -> str:
    """The number with its noun; `words`: a plural that is not just `word` with an s."""
    return f"{num} {word if num == 1 else words or word + 's'}"
